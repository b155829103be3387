"""How this rank tells its own failure: in its words, with the step that it belongs to, and when it was first seen.

Owns the message only; whom it goes to and what is waited for then is the rescuer's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch_watchdog_agent.rescue.gpu import OnGpu
from torch_watchdog_agent.rescue.recent import RecentBatches
from torch_watchdog_agent.rescue.words import Words
from torch_watchdog_agent.rescue.workers import TORCHS_WORD, dead_workers
from torch_watchdog_proto.rescue_words import Failed, GroupCalls

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["OwnFailure"]

_OF_DEVICE = "CUDA error"


class OwnFailure:
    """Of one rank."""

    def __init__(self, rank: Rank, gpu: OnGpu, batches: RecentBatches) -> None:
        self._rank, self._gpu, self._batches = rank, gpu, batches
        # id of an exception in flight, when it was noticed, and after which collectives
        self._first_seen: tuple[int, int, tuple[GroupCalls, ...]] | None = None

    def noticed(self, error: BaseException) -> None:
        if self._first_seen is None or self._first_seen[0] != id(error):
            from torch_watchdog_agent.rescue.looking import calls_at

            self._first_seen = (id(error), time.time_ns(), calls_at(error, self._rank))

    def told(self, error: BaseException, words: Words) -> Failed:
        """What is said of it; the batch of its step is kept as a bundle before."""
        if TORCHS_WORD not in words.text and (worker := dead_workers(error)):  # what it met of that is the first of its chain
            words.text = f"{words.text}; {worker}"
        step, between = self._step_of(words.text)
        bundle = self._batches.write_bundle(step, of_device=_OF_DEVICE in words.text)
        self.noticed(error)
        _, time_ns, calls = self._first_seen or (0, 0, ())
        rank = self._rank
        return Failed(
            rank=rank.identity.rank, step=step, between=between, time_ns=time_ns, updates_applied=rank.loop.updates_applied, text=words.text,
            chain=words.chain, where=words.where, calls=calls, bundle=bundle, fetching=self._batches.fetch_behind(error),
            by_itself=words.by_itself,
        )  # fmt: skip

    def step_at_hand(self) -> tuple[int, bool]:
        """The step that it is in, or between two the next, and whether that is so."""
        loop = self._rank.loop
        in_window = loop.is_open(loop.step)
        return loop.step + (not in_window and loop.updates_applied > 0), not in_window

    def _step_of(self, failure: str) -> tuple[int, bool]:
        """A device's failure is heard when Python is steps ahead of it."""
        step = self._gpu.step_of_failure() if _OF_DEVICE in failure else None
        return self.step_at_hand() if step is None else (step, False)
