"""A Lightning training as a user might have written it; it knows nothing of the watchdog. It says what its parameters are after each step.

Dropout, momentum, a scheduler and shuffling are there because each is a way to lose bit-identity. With --never no rank trains in one step:
what a skip must equal. With --instead the data set gives another sample of the same batch in place of one: what a stop and its resume must equal.
With --by-hand the module steps two optimizers itself, each of which Lightning counts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from collections.abc import Callable

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, CLASSES = 40, 6, 3
ON_GPU = os.environ.get("E2E_DEVICE") == "cuda"


class Rows(Dataset):
    """Sample i from its own generator, so that every run sees the same data; `bad` gets a token id past the table."""

    def __init__(self, count: int, bad: int | None) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=rng)
        if index == self.bad:
            ids[4] = VOCABULARY + 11
        return {"index": torch.tensor(index), "ids": ids, "labels": torch.tensor(index % CLASSES)}


class Net(lightning.LightningModule):
    def __init__(self, never: int | None, signals: tuple[tuple[int, int, int], ...] = (), dropout: float = 0.3) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, CLASSES)
        self.never, self.leaves_out, self.signals = never, False, signals

    @property
    def num_steps(self) -> int:
        return self.global_step

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        for rank, step, number in self.signals:
            if (rank, step) == (self.global_rank, self.num_steps):
                os.kill(os.getpid(), number)
        return nn.functional.cross_entropy(self.head(self.drop(self.table(batch["ids"]).mean(1))), batch["labels"])

    def optimizer_step(self, epoch: int, number: int, optimizer: torch.optim.Optimizer, closure: Callable[[], object]) -> None:
        self.leaves_out = self.global_step == self.never
        if not self.leaves_out:
            optimizer.step(closure)
            return
        with torch.random.fork_rng():  # Lightning asks for the closure's result
            closure()

    def lr_scheduler_step(self, scheduler: torch.optim.lr_scheduler.LRScheduler, metric: object) -> None:
        if not self.leaves_out:
            scheduler.step()

    def on_train_start(self) -> None:
        say(f"rank {self.global_rank} begins at {self.num_steps} with {self.digest()}")

    def on_train_batch_end(self, *_: object) -> None:
        say(f"rank {self.global_rank} after step {self.num_steps - 1} at {self.num_steps} with {self.digest()}")

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def digest(self) -> str:
        """Of the parameters and of what their next update depends on; not of the scheduler's, which has moved on where we look."""
        optimizers = self.optimizers() if isinstance(self.optimizers(), list) else [self.optimizers()]
        return digest_of(self, [optimizer.optimizer for optimizer in optimizers])


def digest_of(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    state = [value for of_one in states for held in of_one.values() for _, value in sorted(held.items())]
    return hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in [*module.parameters(), *state])).hexdigest()


class ByHand(Net):
    automatic_optimization = False

    @property
    def num_steps(self) -> int:
        return self.global_step // 2

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.manual_backward(super().training_step(batch, number))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.table.parameters(), lr=0.1), torch.optim.AdamW(self.head.parameters(), lr=0.1)]


class Collate:
    """Stacks the samples; `instead`: another sample of the batch in place of this one."""

    def __init__(self, instead: int | None) -> None:
        self.instead = instead

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        fine = [sample for sample in samples if sample["index"] != self.instead]
        samples = [sample if sample["index"] != self.instead else fine[place % len(fine)] for place, sample in enumerate(samples)]
        return {key: torch.stack([sample[key] for sample in samples]) for key in ("ids", "labels")}


def say(line: str) -> None:
    """One write, so that the lines of two ranks never mix."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int)
    parser.add_argument("--never", type=int)
    parser.add_argument("--instead", type=int)
    parser.add_argument("--dies", type=int, nargs=2, help="a rank, and after how many steps it is killed")
    parser.add_argument("--told", type=int, nargs=2, help="a rank, and after how many steps it gets a SIGTERM")
    parser.add_argument("--handler", action="store_true", help="the script has one of its own for that")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--ckpt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(7, verbose=False)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    trainer = lightning.Trainer(
        accelerator="gpu" if ON_GPU else "cpu", devices=devices, num_nodes=int(os.environ.get("WORLD_SIZE", devices)) // devices,
        strategy="ddp", max_epochs=args.epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=args.accumulate,
    )  # fmt: skip
    loader = DataLoader(Rows(48, args.bad), batch_size=4, shuffle=True, collate_fn=Collate(args.instead))
    if args.handler:
        signal.signal(signal.SIGTERM, lambda *_: say("the script's own handler"))
    meant = ((args.dies, signal.SIGKILL), (args.told, signal.SIGTERM)) if not args.ckpt else ()
    signals = tuple((*place, number) for place, number in meant if place)
    module = (ByHand if args.by_hand else Net)(args.never, signals, args.dropout)
    trainer.fit(module, loader, ckpt_path=args.ckpt)
    torch.distributed.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


if __name__ == "__main__":
    main()
