"""A plain accelerate loop as a user might have written it; --load-state and --restore are its two ways to resume.

Dropout, a scheduler and shuffling are there because each is a way to lose bit-identity. It says where accelerate calls a step left out, and what its
scheduler then is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
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
        return {"ids": ids, "labels": torch.tensor(index % CLASSES)}


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.table(ids).mean(1)))


def say(line: str) -> None:
    """One write, so that the lines of two ranks never mix."""
    os.write(1, f"{line}\n".encode())


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256()
    tensors = [*model.state_dict().values(), *(value for state in optimizer.state_dict()["state"].values() for value in state.values())]
    for tensor in tensors:
        sha.update(tensor.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def save_by_hooks(accelerator: Accelerator, who: str) -> None:
    """The script's own way to save its model: by whom accelerate calls the main process, or by whom torch calls rank 0."""

    def save(models: list[nn.Module], weights: list[dict], folder: str) -> None:
        if accelerator.is_main_process if who == "main" else torch.distributed.get_rank() == 0:
            torch.save(accelerator.unwrap_model(models[0]).state_dict(), Path(folder) / "mine.pt")
        weights.clear()

    def load(models: list[nn.Module], folder: str) -> None:
        accelerator.unwrap_model(models.pop()).load_state_dict(torch.load(Path(folder) / "mine.pt", weights_only=True))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int)
    parser.add_argument("--never", type=int)
    parser.add_argument("--dies", type=int, nargs=2, help="a rank, and after how many steps it is killed")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--load-state")
    parser.add_argument("--bare", action="store_true", help="nothing but accelerate's load_state: the epoch begins anew")
    parser.add_argument("--restore", help="a checkpoint; empty: the one that the launch was given")
    parser.add_argument("--hooks", choices=("main", "rank 0"))
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=not ON_GPU, dataloader_config=seedable, gradient_accumulation_steps=args.accumulate)
    set_seed(7)
    model = Net(args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    loader = DataLoader(Rows(args.rows, args.bad), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.hooks:
        save_by_hooks(accelerator, args.hooks)
    first_epoch, step = 0, 0
    if args.bare:
        accelerator.load_state(args.load_state)
    elif args.load_state or args.restore is not None:
        import torch_watchdog_agent

        if args.load_state:
            accelerator.load_state(args.load_state)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler} if args.load_state is None else {"model": None}
        resumed = torch_watchdog_agent.restore(**objects, loader=loader, path=args.restore or args.load_state)
        if resumed is not None:
            first_epoch, step, args.dies = resumed.epoch, resumed.step, None
    for epoch in range(first_epoch, args.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                if step == args.never:
                    if accelerator.sync_gradients:
                        args.never = None
                    continue
                if args.dies == [accelerator.process_index, step]:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            say(f"rank {accelerator.process_index} step {step} loss {loss.item().hex()}")
            if accelerator.sync_gradients:
                say(f"rank {accelerator.process_index} left out {accelerator.optimizer_step_was_skipped}, rate {scheduler.get_last_lr()}")
                step += not accelerator.optimizer_step_was_skipped
    if args.out:
        Path(args.out).mkdir(exist_ok=True)
        (Path(args.out) / f"digest-{accelerator.process_index}").write_text(digest(accelerator.unwrap_model(model), optimizer.optimizer))
    accelerator.end_training()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


if __name__ == "__main__":
    main()
