"""What the ranks of a scan have found so far, put together. Owns the files' names and the merging; it must not know processes or the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_watchdog_proto.messages import EXIT_BAD_DATA

__all__ = ["RankState", "Results", "is_scan", "read_results"]

FOLDER = "scan"
EXIT_UNFINISHED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """How far one rank is. `driving`: it has left the training steps behind and only looks at data."""

    rank: int
    world_size: int
    batches: int
    samples: int
    total_batches: int | None
    unconfirmed: int
    driving: bool
    seconds: float
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """`bad` holds one entry for each bad sample, in the data set's order where its index is known."""

    ranks: tuple[RankState, ...]
    bad: tuple[Mapping[str, Any], ...]

    @property
    def finished(self) -> bool:
        """Every rank has seen the end of its part, and there was one."""
        return (
            not self.saw_nothing
            and bool(self.ranks)
            and len(self.ranks) == self.ranks[0].world_size
            and all(rank.finished for rank in self.ranks)
        )

    @property
    def saw_nothing(self) -> bool:
        """The command came to its end, or was ended behind some updates, and no rank has met a batch."""
        return not self.bad and not self.batches and any(rank.finished for rank in self.ranks)

    @property
    def batches(self) -> int:
        return sum(rank.batches for rank in self.ranks)

    @property
    def samples(self) -> int:
        return sum(rank.samples for rank in self.ranks)

    @property
    def total_batches(self) -> int | None:
        """None before every rank has said how many it will see."""
        totals = [rank.total_batches for rank in self.ranks if rank.total_batches is not None]
        return sum(totals) if self.ranks and len(totals) == self.ranks[0].world_size else None

    @property
    def seconds(self) -> float:
        """Of the slowest rank, without the steps of learning."""
        return max((rank.seconds for rank in self.ranks), default=0.0)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def unconfirmed(self) -> int:
        return sum(rank.unconfirmed for rank in self.ranks)

    def exit_code(self, of_the_command: int) -> int:
        """What `watchdog scan` ends with: 0 says that all data were seen and are fine."""
        return EXIT_BAD_DATA if self.bad else 0 if self.finished else max(of_the_command, EXIT_UNFINISHED)

    def as_json(self) -> dict[str, Any]:
        return {
            "finished": self.finished, "ranks": len(self.ranks), "batches": self.batches, "samples": self.samples, "seconds": round(self.seconds, 3),
            "samples_per_s": round(self.samples_per_s, 1), "unconfirmed_batches": self.unconfirmed, "bad": list(self.bad),
        }  # fmt: skip


def is_scan(run_dir: Path) -> bool:
    """Whether the run only looked at data. Known once a rank has begun."""
    return (run_dir / FOLDER).is_dir()


def read_results(run_dir: Path) -> Results:
    """As they are at this moment; ranks replace their state files whole. Only plain files: opening a pipe that nobody writes to would never return."""
    folder = run_dir / FOLDER
    states = [state for path in sorted(folder.glob("rank-*.json")) if path.is_file() and (state := _state(path)) is not None]
    files = [path for path in sorted(folder.glob("rank-*.jsonl")) if path.is_file()]
    lines = [line for path in files for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return Results(ranks=tuple(sorted(states, key=lambda state: state.rank)), bad=tuple(merged(_entries(lines))))


def _state(path: Path) -> RankState | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return RankState(**{name: found[name] for name in RankState.__slots__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _entries(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # the last line of a rank that was killed


def merged(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A sample that several ranks have met (padding of a sampler, a scan that went on) counts once."""
    found: dict[Any, Mapping[str, Any]] = {}
    for entry in entries:
        index = entry.get("dataset_index")
        where = entry.get("indices") or (entry.get("rank"), entry.get("batch"), entry.get("position_in_batch"))
        name = ("sample", index) if index is not None else (entry.get("kind"), *map(str, where))
        found.setdefault(name, entry)
    return sorted(found.values(), key=_order)


def _order(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    index = entry.get("dataset_index")
    listed = entry.get("indices") or [None]
    known = index if index is not None else listed[0]
    return (0, int(known), 0) if known is not None else (1, int(entry.get("rank") or 0), int(entry.get("batch") or 0))
