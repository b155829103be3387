"""A Lightning training as a user might have written it; it knows nothing of the watchdog. It says what its parameters are after each step."""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, CLASSES = 40, 6, 3


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


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, CLASSES)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(batch["ids"]).mean(1)), batch["labels"])

    def on_train_start(self) -> None:
        say(f"rank {self.global_rank} begins at {self.global_step} with {self.digest()}")

    def on_train_batch_end(self, *_: object) -> None:
        say(f"rank {self.global_rank} after step {self.global_step - 1} at {self.global_step} with {self.digest()}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def digest(self) -> str:
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in self.parameters())).hexdigest()


def say(line: str) -> None:
    """One write, so that the lines of two ranks never mix."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int)
    parser.add_argument("--ckpt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(7, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(Rows(48, args.bad), batch_size=4, shuffle=True), ckpt_path=args.ckpt)
    torch.distributed.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


if __name__ == "__main__":
    main()
