"""What can go wrong with a checkpoint, as errors that say what to do next."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint could not be written, committed or read."""


class RestoreError(CheckpointError):
    """The checkpoint at `path` was refused, or does not fit the objects it was to be loaded into."""

    def __init__(self, path: Path, what: str, next_step: str) -> None:
        super().__init__(f"cannot resume from {path}: {what}. {next_step}")
        self.path = path
