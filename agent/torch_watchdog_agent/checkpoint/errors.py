"""What can go wrong with a checkpoint, as errors that say what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch_watchdog_agent.checkpoint.refusals import refusal

LONGEST_SENTENCE = 500


def in_words(error: BaseException, *, alone: bool = False) -> str:
    """One sentence: where the system refused something, what that was and what to do. Of torch's CheckpointException, whose text is a traceback of each rank,
    the first rank's own error is said. `alone`: a rank that saves without the others is the first to torch, whatever its number."""
    by_rank = getattr(error, "failures", None)
    if isinstance(by_rank, Mapping) and by_rank:
        rank = min(by_rank)
        words = in_words(by_rank[rank][0])
        return words if alone else f"rank {rank}: {words}"
    first_line = next(iter(str(error).strip().splitlines()), "")
    if type(error) is CheckpointError:  # a sentence of ours, which has in it what the system refused
        return first_line[:LONGEST_SENTENCE]
    return (refusal(error) or f"{type(error).__name__}: {first_line}")[:LONGEST_SENTENCE]


class CheckpointError(Exception):
    """A checkpoint could not be written, committed or read."""


class RestoreError(CheckpointError):
    """The checkpoint at `path` was refused, or does not fit the objects it was to be loaded into."""

    def __init__(self, path: Path, what: str, next_step: str) -> None:
        super().__init__(f"cannot resume from {path}: {what}. {next_step}")
        self.path = path
