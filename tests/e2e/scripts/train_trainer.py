"""A training with transformers' Trainer as a user might have written it; it knows nothing of the watchdog.

Dropout, momentum, a scheduler and shuffling are there because each is a way to lose bit-identity. With --instead the data set gives another sample of the same
batch in place of one: what a run must equal in which that sample was left out. With --never no rank trains in one step,
which the Trainer counts as it does one that a loss scaler left out: what a skip must equal. With --dies a rank is killed in its forward after so many steps.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, CLASSES = 40, 6, 3
ON_GPU = os.environ.get("E2E_DEVICE") == "cuda"


class Rows(Dataset):
    """Sample i from its own generator, so that every run sees the same data; `bad` gets a token id past the table."""

    def __init__(self, count: int, bad: int | None) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        rng = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=rng)
        if index == self.bad:
            ids[4] = VOCABULARY + 11
        return {"index": index, "input_ids": ids, "labels": torch.tensor(index % CLASSES)}


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.table(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Pretrained(PreTrainedModel):
    """The same as a model of transformers', which has a way of its own to be saved."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig, dropout: float = 0.0) -> None:
        super().__init__(config)
        self.net = Net(dropout)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.net(input_ids, labels)


class Collate:
    """Stacks the samples, without their numbers; `instead`: another sample of the batch in place of this one."""

    def __init__(self, instead: int | None) -> None:
        self.instead = instead

    def __call__(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        fine = [sample for sample in samples if sample["index"] != self.instead]
        samples = [sample if sample["index"] != self.instead else fine[place % len(fine)] for place, sample in enumerate(samples)]
        return {key: torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "labels")}


def say(line: str) -> None:
    """One write, so that the lines of two ranks never mix."""
    os.write(1, f"{line}\n".encode())


class Loud(Trainer):
    last_loss = ""
    never: int | None = None
    dies: tuple[int, int] | None = None  # a rank, and after how many steps

    def training_step(self, *args, **kwargs):
        if self.dies == (self.args.process_index, self.state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        left_out = self.state.global_step == self.never
        if self.never is not None:
            self.optimizer._is_overflow = left_out  # accelerate's word for a step that was left out
        return torch.tensor(0.0, device=self.args.device) if left_out else super().training_step(*args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.last_loss = (loss[0] if isinstance(loss, tuple) else loss).item().hex()
        return loss


class EachStep(TrainerCallback):
    """`meet`: a folder in which rank 0 says after five steps that it waits, until somebody has done something and says go."""

    trainer: Loud
    meet: str | None

    def await_word(self, jit) -> None:
        """Each rank's Trainer sees the signal by a timer of its own: ranks that train on meanwhile may save in different steps, and then wait for each other
        in vain."""
        deadline = time.monotonic() + 60
        while not jit.is_checkpoint_requested and time.monotonic() < deadline:
            time.sleep(0.02)

    def on_step_end(self, args, state, control, **kwargs):
        say(f"rank {args.process_index} step {state.global_step - 1} loss {self.trainer.last_loss}")
        say(f"rank {args.process_index} rate {state.global_step} {kwargs['lr_scheduler'].get_last_lr()}")
        if self.meet and state.global_step == 5 and args.process_index == 0:
            (Path(self.meet) / "here").touch()
            deadline = time.monotonic() + 60
            while not (Path(self.meet) / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        if self.meet and state.global_step == 5 and args.enable_jit_checkpoint:
            (jit,) = (its for each in self.trainer.callback_handler.callbacks if (its := getattr(each, "jit_manager", None)) is not None)
            self.await_word(jit)


def digest(trainer: Trainer) -> str:
    sha = hashlib.sha256(repr((trainer.state.global_step, sorted(trainer.lr_scheduler.state_dict().items()))).encode())
    for name, value in sorted(trainer.model.state_dict().items()):
        sha.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    for state in trainer.optimizer.state_dict()["state"].values():
        for name, value in sorted(state.items()):
            sha.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int)
    parser.add_argument("--instead", type=int)
    parser.add_argument("--never", type=int)
    parser.add_argument("--dies", type=int, nargs=2)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--best", action="store_true", help="the Trainer keeps the best of its checkpoints in mind")
    parser.add_argument("--pretrained", action="store_true", help="a model of transformers' own kind")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--again", action="store_true", help="resume where there is a checkpoint; such a run does not die")
    parser.add_argument("--save-steps", type=int, default=2)
    parser.add_argument("--meet")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--jit", action="store_true", help="the Trainer's own checkpoint on SIGTERM")
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    args = TrainingArguments(
        output_dir="trained", per_device_train_batch_size=4, num_train_epochs=given.epochs, gradient_accumulation_steps=given.accumulate, learning_rate=0.1,
        logging_steps=1, save_strategy="steps", save_steps=given.save_steps, save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=not ON_GPU, seed=7,
        remove_unused_columns=False, **({"enable_jit_checkpoint": True} if given.jit else {}),
        **({"eval_strategy": "steps", "eval_steps": given.save_steps, "load_best_model_at_end": True} if given.best else {}),
    )  # fmt: skip
    each = EachStep()
    trainer = Loud(
        model=Pretrained(PretrainedConfig(), given.dropout) if given.pretrained else Net(given.dropout),
        args=args,
        train_dataset=Rows(48, given.bad),
        eval_dataset=Rows(8, None),
        data_collator=Collate(given.instead),
        callbacks=[each],
    )
    each.trainer, each.meet, trainer.never = trainer, given.meet, given.never
    resumes = given.resume or (given.again and any(Path(args.output_dir).glob("checkpoint-*")))
    trainer.dies = tuple(given.dies) if given.dies and not resumes else None
    trainer.train(resume_from_checkpoint=True if resumes else None)
    if given.out:
        Path(given.out).mkdir(exist_ok=True)
        (Path(given.out) / f"digest-{args.process_index}").write_text(digest(trainer))
    say(f"rank {args.process_index} done")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


if __name__ == "__main__":
    main()
