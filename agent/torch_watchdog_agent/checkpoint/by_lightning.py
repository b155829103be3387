"""Lightning: a folder with `lightning.ckpt`, as `trainer.fit(..., ckpt_path=...)` takes it. Our rank files lie beside it."""

from __future__ import annotations

from pathlib import Path

from torch_watchdog_agent.checkpoint.foreign import Writer
from torch_watchdog_agent.checkpoint.living import instances

FORMAT = "lightning"
FILE = "lightning.ckpt"


def writer(path: Path) -> Writer | None:
    """None where no Lightning Trainer trains, or where several do: whose would it be?"""
    homes = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
    training = [trainer for home in homes for trainer in instances(home, "Trainer") if trainer.training]
    if len(training) != 1:
        return None
    trainer = training[0]
    return Writer(
        format=FORMAT, path=path, write=lambda folder: trainer.save_checkpoint(folder / FILE, weights_only=False), by="Trainer.save_checkpoint"
    )  # fmt: skip
