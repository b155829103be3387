"""The user's own way of writing a checkpoint, in place of ours. Owns the one registered function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch_watchdog_agent.checkpoint.foreign import Writer

FORMAT = "callback"

UserWriter = Callable[[Path], None]
Given = TypeVar("Given", bound=UserWriter | None)
_writer: UserWriter | None = None


def on_checkpoint(write_checkpoint: Given) -> Given:
    """Have `write_checkpoint(folder)` write the checkpoint. It runs on every rank at the boundary; also usable as a decorator.

    The folder is new and empty, and gets its final name once every rank has returned. None: the framework's or our own way again.

        @torch_watchdog_agent.on_checkpoint
        def save(folder):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"rank-{rank}.pt")
    """
    global _writer
    _writer = write_checkpoint
    return write_checkpoint


def writer(path: Path) -> Writer | None:
    """None where nobody registered a function."""
    if _writer is None:
        return None
    return Writer(format=FORMAT, path=path, write=_writer, by=getattr(_writer, "__qualname__", str(_writer)))
