"""The daemon's half of a rescue: a rank has failed; the others are freed, one whole copy of the state is saved (by one rank, or in parts by several that
hold one together), everybody ends.

Owns one rescue of one attempt; knows no socket, clock or file, and not who failed first: only who may hold something to save. Every event may come
late, twice or never: what does not fit changes nothing, and every rescue ends by its deadline.

    idle --a rank failed, others are here--> freeing --Freed--> saving --Saved--> sealing --Committed--> over
                                                |                 |                 |
                                                +-- nobody holds all, the saver fails and no other is left, the deadline --> over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

from torch_watchdog_proto.messages import Committed, Leave, RankMessage, Saved, WriteCommitted
from torch_watchdog_proto.rescue_words import Free, Freed, Rescue
from torch_watchdog_proto.sentences import count
from torch_watchdog_proto.stop.events import CheckpointFact, FromRank, RankGone, Tell, Tick
from torch_watchdog_proto.stop.order import checkpoint_fact, files_of, ranks_in_words

__all__ = ["Effect", "Ended", "Event", "RankFailed", "RescueCoordinator"]

FREE_TIMEOUT_S = 10.0  # for every rank's word, once it was told to come free
SETTLE_S = 2.0  # for the others' words, once one rank holds all
State: TypeAlias = Literal["idle", "freeing", "saving", "sealing", "over"]


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank raises, has died or hangs. `victim`: it only suffers from a peer's failure, waits for a word, and may hold a whole state. `waits`: it raises
    something of its own and waits for a word, too: it is asked for what it held before that where no healthy rank is left. `why_not`: why it cannot be, as
    `failed between two steps`. `updates_applied`: by its own word; 0 where it has said none, or applies none."""

    rank: int
    reason: str
    generation: int  # for the rescue, if this begins one
    victim: bool = False
    waits: bool = False
    why_not: str = ""
    exit_code: int = 1
    updates_applied: int = 0


Event: TypeAlias = RankFailed | RankGone | FromRank | Tick


# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The rescue is over; the keepers may tell the launcher. `reason` says what was saved, or why nothing was."""

    reason: str
    checkpoint: CheckpointFact | None
    freed: tuple[int, ...]
    updates_applied: int | None
    seconds: float
    seconds_to_free: float | None
    newest: str


Effect: TypeAlias = Tell | Ended


class RescueCoordinator:
    """At most one rescue. `checkpoints_dir` is a path that the ranks know."""

    def __init__(self, *, checkpoints_dir: str, grace_s: float) -> None:
        self._checkpoints_dir, self._grace_s = checkpoints_dir, grace_s
        self.state: State = "idle"
        self._here: set[int] = set()
        self._ranks: set[int] = set()  # all that were ever here
        self._failed: set[int] = set()  # not victims
        self._last: int | None = None  # of those, one that waits, with no healthy rank left
        self._why_not = ""  # the newest of those cannot be asked
        self._said: dict[int, int] = {}  # the updates of those, by their own word
        self._freed: dict[int, Freed] = {}
        self._told: set[int] = set()  # to save
        self._unable: set[int] = set()  # those that could not
        self._savers: tuple[int, ...] = ()  # by their part
        self._saved: dict[int, Saved] = {}
        self._generation = 0
        self._reason, self._problem = "", ""
        self._exit_code = 1
        self._opened_at = self._free_at = self._deadline = 0.0

    @property
    def next_deadline(self) -> float | None:
        return self._deadline if self.state in ("freeing", "saving", "sealing") else None

    def rank_here(self, rank: int) -> None:
        """A rank can be asked."""
        self._here.add(rank)
        self._ranks.add(rank)

    def handle(self, event: Event, *, now: float) -> tuple[Effect, ...]:
        """Takes one event; returns what to do."""
        match event:
            case RankFailed():
                return self._on_failed(event, now)
            case RankGone():
                return self._on_gone(event.rank, now)
            case FromRank():
                return self._on_said(event.message, now)
            case Tick():
                return self._on_tick(now)

    # Freeing

    def _on_failed(self, failed: RankFailed, now: float) -> tuple[Effect, ...]:
        if self.state == "over":
            return (Tell(rank=failed.rank, order=Leave(generation=self._generation)),)
        if self._is_held(failed.rank):
            return ()
        if not failed.victim:
            self._failed.add(failed.rank)
            self._why_not = failed.why_not
            if failed.updates_applied:
                self._said[failed.rank] = failed.updates_applied
            self._last = failed.rank if failed.waits and self._here <= self._failed else self._last
        effects: tuple[Effect, ...] = ()
        if self.state == "idle":
            effects = self._begin(failed, now)
        if not failed.victim and not (failed.waits and failed.rank == self._last):
            effects += (Tell(rank=failed.rank, order=Leave(generation=self._generation)),)
        return effects + self._go_on(now)

    def _is_held(self, rank: int) -> bool:
        """What it has said it holds, it holds whatever its script raises from then on: it applies no update any more, and waits at its end for a word. Where
        its process ends all the same, or its device answers no more, that is heard."""
        return rank in self._here and rank in self._freed and self._freed[rank].holds != "nothing"

    def _begin(self, failed: RankFailed, now: float) -> tuple[Effect, ...]:
        self.state, self._generation = "freeing", failed.generation
        self._reason, self._exit_code = failed.reason, failed.exit_code
        self._opened_at, self._deadline = now, now + FREE_TIMEOUT_S
        free = Free(generation=self._generation, reason=failed.reason, exit_code=failed.exit_code, grace_s=self._grace_s)
        return tuple(Tell(rank=rank, order=free) for rank in sorted(self._asked()))

    def _asked(self) -> set[int]:
        return self._here - (self._failed - {self._last})

    def _on_gone(self, rank: int, now: float) -> tuple[Effect, ...]:
        self._here.discard(rank)
        self._why_not = self._why_not if rank in self._failed else ""
        if self.state in ("saving", "sealing") and rank in self._savers:
            return self._try_next(f"rank {rank} ended while it saved", now)
        return self._go_on(now)

    def _go_on(self, now: float) -> tuple[Effect, ...]:
        """Once every rank that can be asked has answered (or has had its time to)."""
        if self.state != "freeing":
            return ()
        waiting = self._asked() - self._freed.keys()
        if waiting and now < self._deadline:
            return ()
        self._free_at = now
        return self._try_next("", now)

    def _on_said(self, message: RankMessage, now: float) -> tuple[Effect, ...]:
        if getattr(message, "generation", None) != self._generation:
            return ()
        match message:
            case Freed():
                return self._on_freed(message, now)
            case Saved():
                return self._on_saved(message, now)
            case Committed():
                return self._on_committed(message, now)
            case _:
                return ()

    def _on_freed(self, freed: Freed, now: float) -> tuple[Effect, ...]:
        if self.state != "freeing":
            return ()
        self._freed[freed.rank] = freed
        if self._able():
            self._deadline = min(self._deadline, now + SETTLE_S)
        return self._go_on(now)

    # Saving

    def _try_next(self, problem: str, now: float) -> tuple[Effect, ...]:
        """One replica is enough: of the ranks that hold all the one with the fewest updates, which every healthy rank has applied; else one rank a part."""
        self._problem = problem or self._problem
        able = self._able()
        if not able:
            return self._end(self._why_nothing(), None, now)
        self.state, self._savers, self._deadline = "saving", tuple(freed.rank for freed in able), now + self._grace_s
        new = [freed for freed in able if freed.rank not in self._told]
        self._told |= {freed.rank for freed in new}
        path = f"{self._checkpoints_dir}/step-{able[0].updates_applied}"
        told = tuple(Tell(rank=one.rank, order=Rescue(generation=self._generation, path=path, reason=self._reason)) for one in new)
        return told + self._seal_if_whole(now)

    def _able(self) -> list[Freed]:
        """Who may save: one rank, or one for each part, all after the same updates. A part that is being written, or is, need not be written again."""
        here = self._asked() - self._unable if not self._out_of_step() else set[int]()
        whole = [freed for rank, freed in self._freed.items() if freed.holds == "all" and rank in here - self._told]
        if whole:
            return [min(whole, key=lambda freed: (freed.updates_applied, freed.rank))]
        split: dict[tuple[int, int], dict[int, Freed]] = {}
        for rank in sorted(here & self._freed.keys(), reverse=True):
            freed = self._freed[rank]
            if freed.holds == "part" and freed.part < freed.parts:
                split.setdefault((freed.updates_applied, freed.parts), {})[freed.part] = freed
        complete = [parts for (_, whole_in), parts in sorted(split.items()) if len(parts) == whole_in]
        return [complete[0][part] for part in sorted(complete[0])] if complete else []

    def _out_of_step(self) -> str:
        """Why what they hold is the state of no step; empty where it is one. An update takes a collective of all: who has applied two more than another has
        joined in what that one did in other steps, as where it repeats one. A failed rank, whose Python may be ahead of its GPU, tells only the least."""
        holds = {rank: freed.updates_applied for rank, freed in self._freed.items() if freed.holds != "nothing" and rank in self._asked()}
        updates = self._said | holds
        ahead, behind = max(holds, key=holds.__getitem__, default=None), min(updates, key=updates.__getitem__, default=None)
        if ahead is None or behind is None or updates[ahead] < updates[behind] + 2:
            return ""
        differ = f"rank {ahead} has applied {count(updates[ahead], 'update')} and rank {behind} {updates[behind]}"
        return f"{differ}: they were not in the same steps, as where a script repeats one"

    def _why_nothing(self) -> str:
        if self._problem:
            nobody = ("no healthy rank is left",) if not self._asked() and len(self._ranks) > 1 else ()
            return f"nothing was saved: {'; '.join((self._problem, *nobody))}"
        if out_of_step := self._out_of_step():
            return f"nothing was saved: {out_of_step}"
        whys = dict.fromkeys(freed.why for _, freed in sorted(self._freed.items()) if freed.holds != "all" and freed.why)
        silent = sorted(self._asked() - self._freed.keys())
        parts = [*whys, *([f"no word from {ranks_in_words(silent)}"] if silent else [])]
        return "nothing was saved: " + ("; ".join(parts) or self._why_nobody())

    def _why_nobody(self) -> str:
        """Why none is asked."""
        if len(self._ranks) > 1:
            return "no healthy rank is left" + (f": the last one {self._why_not}" if self._why_not else "")
        return f"it {self._why_not}" if self._why_not else "its process is gone"

    def _on_saved(self, saved: Saved, now: float) -> tuple[Effect, ...]:
        if self.state != "saving" or saved.rank not in self._savers:
            return ()
        if saved.error is not None:
            self._unable.add(saved.rank)
            return self._try_next(f"rank {saved.rank}: {saved.error}", now)
        self._saved[saved.rank] = saved
        return self._seal_if_whole(now)

    def _seal_if_whole(self, now: float) -> tuple[Effect, ...]:
        """Once every part is written: the first saver's work."""
        if not self._saved.keys() >= set(self._savers):
            return ()
        self.state, self._deadline = "sealing", now + self._grace_s
        manifest = self._manifest([self._saved[rank] for rank in self._savers])
        return (Tell(rank=self._savers[0], order=WriteCommitted(generation=self._generation, manifest=manifest, good=manifest["finite"])),)

    def _manifest(self, parts: Sequence[Saved]) -> Mapping[str, Any]:
        return {
            "updates_applied": parts[0].updates_applied, "format": parts[0].format, "ranks": sorted(self._savers),
            "finite": all(saved.finite for saved in parts), "kind": "rescue", "generation": self._generation,
            "reason": self._reason, "files": files_of(saved.files for saved in parts),
        }  # fmt: skip

    def _on_committed(self, committed: Committed, now: float) -> tuple[Effect, ...]:
        if self.state != "sealing" or committed.rank != self._savers[0]:
            return ()
        if committed.error is not None:
            self._unable.add(committed.rank)
            return self._try_next(f"rank {committed.rank}: {committed.error}", now)
        saved, ranks = self._saved[committed.rank], sorted(self._savers)
        finite = all(self._saved[rank].finite for rank in ranks)
        fact = checkpoint_fact(saved, saved.path, committed=finite, finite=finite, saved_by=ranks)
        how = "" if finite else ", which holds values that are not finite and must not be resumed from"
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} together"
        return self._end(f"{who} saved the state after {count(saved.updates_applied, 'update')}{how}", fact, now)

    # The end

    def _on_tick(self, now: float) -> tuple[Effect, ...]:
        if self.state == "freeing":
            return self._go_on(now)
        if self.next_deadline is None or now < self._deadline:
            return ()
        # No other may begin under the same name while this one still writes; and the time that was asked for is over.
        late = sorted(set(self._savers) - self._saved.keys()) or self._savers[:1]
        return self._end(f"nothing was saved: rank {', '.join(map(str, late))} did not save in time", None, now)

    def _end(self, reason: str, checkpoint: CheckpointFact | None, now: float) -> tuple[Effect, ...]:
        self.state = "over"
        told = tuple(
            Tell(rank=rank, order=Leave(generation=self._generation, committed=checkpoint is not None and checkpoint.committed))
            for rank in sorted(self._asked())
        )
        newest = max((freed.newest for freed in self._freed.values()), key=_step_of, default="")
        ended = Ended(
            reason=reason, checkpoint=checkpoint, freed=tuple(sorted(self._freed)), seconds=now - self._opened_at, newest=newest,
            updates_applied=checkpoint.updates_applied if checkpoint else None,
            seconds_to_free=self._free_at - self._opened_at if self._freed else None,
        )  # fmt: skip
        return (*told, ended)


def _step_of(path: str) -> int:
    number = PurePosixPath(path).name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1
