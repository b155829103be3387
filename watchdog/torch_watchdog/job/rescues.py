"""One attempt's rescue as the job runs it: when it begins, what came of it, and when the keepers may tell the launcher.

Owns the order of the last words: first the rank that failed first, so that the launcher names it too, the others a moment later. The protocol is
`stop/rescue.py`. Pure: `now` is an argument.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from torch_watchdog.job.first_failure import FirstFailure
from torch_watchdog_proto.messages import RankMessage
from torch_watchdog_proto.rescue_words import Failed, Release
from torch_watchdog_proto.stop.events import FromRank, RankGone, Tell, Tick
from torch_watchdog_proto.stop.rescue import Effect, Ended, RankFailed, RescueCoordinator

__all__ = ["Rescues", "why_not_asked"]

LONGEST_END_S = 8.0  # of a rank that has failed and is still tearing down
HEAD_START_S = 1.5  # of the first failure's keeper: a second for the workers that its rank left behind; launchers look ten times a second
_DEVICE_IS_LOST = re.compile(r"CUDA error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error")


class Rescues:
    """`allowed` is False where the job is only observed: then nobody is told anything, and there are no keepers."""

    def __init__(self, *, checkpoints_dir: str, grace_s: float, allowed: bool) -> None:
        self._coordinator = RescueCoordinator(checkpoints_dir=checkpoints_dir, grace_s=grace_s)
        self._allowed = allowed
        self.ended: Ended | None = None
        self._ranks: set[int] = set()
        self._released: set[int] = set()
        self._killed: set[int] = set()
        self._release_all_at: float | None = None
        self._exited: set[int] = set()
        self._ending: set[int] = set()  # failed first, and their processes are not gone yet

    @property
    def has_begun(self) -> bool:
        return self._coordinator.state != "idle"

    @property
    def deadline(self) -> float | None:
        waiting = self._release_all_at if self._ranks - self._released else None
        return min((time for time in (self._coordinator.next_deadline, waiting) if time is not None), default=None)

    def rank_here(self, rank: int) -> None:
        self._ranks.add(rank)
        self._coordinator.rank_here(rank)

    def failed(self, failed: RankFailed, now: float) -> Iterable[Tell]:
        """A rank has failed: what to tell whom."""
        return self._tell(self._coordinator.handle(failed, now=now)) if self._allowed else ()

    def out(self, rank: int, now: float) -> Iterable[Tell]:
        """A rank can be asked no more; where all has been said, its keeper need not wait."""
        told = self._tell(self._coordinator.handle(RankGone(rank=rank), now=now))
        return (*told, *self._due(now))

    def exited(self, rank: int, now: float, *, by: int | None = None) -> bool:
        """A rank's process has ended: the head start of the first failure begins where that was it. Whether its keeper has killed it,
        as told: `by` is the signal."""
        self._exited.add(rank)
        if rank in self._ending:
            self._ending.discard(rank)
            if not self._ending and self._release_all_at is not None:
                self._release_all_at = min(self._release_all_at, now + HEAD_START_S)
        return rank in self._killed and by == signal.SIGKILL

    def said(self, message: RankMessage, now: float) -> Iterable[Tell]:
        return self._tell(self._coordinator.handle(FromRank(message=message), now=now))

    def tick(self, now: float) -> Iterable[Tell]:
        return (*self._tell(self._coordinator.handle(Tick(), now=now)), *self._due(now))

    def judged(self, first: FirstFailure, *, now: float) -> Iterable[Tell]:
        """It is known who failed first, and the others are saved: that keeper may tell the launcher, the others' a moment later."""
        if not self._allowed:
            return ()
        culprits, kill = {end.rank for end in first.culprits}, any(end.hung for end in first.culprits)
        if self._release_all_at is None:
            self._ending = culprits - self._exited
            self._release_all_at = now + (LONGEST_END_S if self._ending else HEAD_START_S)
        return self._release(culprits, kill=kill)

    def let_go(self, rank: int) -> Iterable[Tell]:
        """It has ended as it was asked to, and nothing is saved for it: its keeper may tell the launcher."""
        return self._release({rank}) if self._allowed else ()

    def _due(self, now: float) -> Iterable[Tell]:
        if self._release_all_at is None or now < self._release_all_at:
            return ()
        return self._release(self._ranks)

    def _release(self, ranks: set[int], *, kill: bool = False) -> tuple[Tell, ...]:
        new = sorted(ranks - self._released)
        self._released |= set(new)
        self._killed |= set(new) - self._exited if kill else set()
        return tuple(Tell(rank=rank, order=Release(generation=0, kill=kill)) for rank in new)

    def _tell(self, effects: Iterable[Effect]) -> tuple[Tell, ...]:
        told = []
        for effect in effects:
            if isinstance(effect, Ended):
                self.ended = effect
            else:
                told.append(effect)
        return tuple(told)


def why_not_asked(failed: Failed) -> str:
    """Why a rank that raises is not asked for its state; empty where it is: in the middle of a step. Between two nobody knows what of the step was still to
    come (a teacher's weights, a scaler), nor from a device that answers no more; a script that ends by an exit of its own is not kept waiting."""
    if failed.between and failed.step == 0:
        return "had trained nothing yet"
    if failed.chain and failed.chain[-1].startswith("SystemExit"):
        return "ended by an exit of the script's own, which is not held back"
    if any(map(_DEVICE_IS_LOST.search, failed.chain)):
        return "has met an error of its GPU, which answers no more"
    return "failed between two steps, where what belongs to its last one may be still to come" if failed.between else ""
