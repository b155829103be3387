"""One order of the coordinator: what it is for, how far it has come, and what can be said of it. Knows no event and no table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from torch_watchdog_proto.checkpoint_names import beside
from torch_watchdog_proto.messages import Commit, Saved, SavedFile
from torch_watchdog_proto.stop.events import CheckpointFact, Closed, OrderKind
from torch_watchdog_proto.stop.table import State

__all__ = [
    "OpenOrder",
    "checkpoint_fact",
    "closed",
    "commit_of",
    "files_of",
    "is_skip",
    "manifest_of",
    "ranks_in_words",
    "why_not_good",
    "why_not_whole",
]


@dataclass(slots=True, kw_only=True)
class OpenOrder:
    """The order under way. `veto`: the step that a bad batch is held for, None for a request."""

    generation: int
    kind: OrderKind
    reason: str
    veto: int | None
    exit_code: int
    save: bool
    leave: bool
    opened_at: float
    deadline: float
    state: State = "preparing"
    commit: Commit | None = None
    passed: dict[int, int] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # or, of a skip, those that have left the step out
    committed: bool = False

    @property
    def is_finite(self) -> bool:
        return all(part.finite for part in self.saved.values())


def is_skip(order: OpenOrder) -> bool:
    """One that is decided and neither saves nor leaves."""
    return order.commit is not None and order.veto is not None and not order.save and not order.leave


def commit_of(order: OpenOrder, *, checkpoints_dir: str, grace_s: float) -> Commit:
    """The decision, once every rank has said how far it is.

    Every rank must stop after the same step, or the next collective hangs: so after the one that the first of them comes to, never the first answer's.
    """
    stop_after = max(order.passed.values()) + 1 if order.veto is None else None
    first_open_step = order.veto if order.veto is not None else (stop_after or 0) + 1
    return Commit(
        generation=order.generation, veto=order.veto, stop_after=stop_after, save=order.save, leave=order.leave, exit_code=order.exit_code,
        path=f"{checkpoints_dir}/step-{first_open_step}", reason=order.reason, grace_s=grace_s,
    )  # fmt: skip


def why_not_whole(parts: Collection[Saved]) -> str | None:
    """Why the ranks' parts make no checkpoint together, or None."""
    for part in parts:
        if part.error is not None:
            return f"rank {part.rank}: {part.error}"
    updates = {part.rank: part.updates_applied for part in parts}
    if len(set(updates.values())) > 1:
        return f"the ranks have applied different numbers of updates: {updates}"
    return None


def why_not_good(parts: Collection[Saved]) -> str | None:
    """Why a checkpoint that is whole is none to go on from, or None."""
    bad = [part.rank for part in parts if not part.finite]
    if not bad:
        return None
    saved = f"what {ranks_in_words(bad)} saved"
    return f"NaN, infinity or a part of a step that could not be taken back is in {saved}, which is kept aside as not good"


def manifest_of(order: OpenOrder) -> Mapping[str, Any]:
    """What the manifest says of the parts. Rank 0 adds what only it knows."""
    parts = [order.saved[rank] for rank in sorted(order.saved)]
    return {
        "updates_applied": parts[0].updates_applied, "format": parts[0].format, "ranks": sorted(order.saved), "finite": order.is_finite,
        "kind": order.kind, "reason": order.reason, "files": files_of(part.files for part in parts),
    }  # fmt: skip


def files_of(parts: Iterable[Iterable[SavedFile]]) -> list[dict[str, Any]]:
    """The files of each part, as a manifest lists them all."""
    return [{"name": file.name, "size": file.size, "sha256": file.sha256} for part in parts for file in part]


def checkpoint_fact(first: Saved, path: str, *, committed: bool, finite: bool, saved_by: Iterable[int]) -> CheckpointFact:
    """`first`: the part of the rank that seals. What is not finite stands beside the name of a good one, as `checkpoint/places.py` of the rank has it."""
    place = PurePosixPath(path)
    return CheckpointFact(
        path=str(place if finite else beside(place, "not-good")), updates_applied=first.updates_applied,
        committed=committed, finite=finite, saved_by=tuple(sorted(saved_by)), format=first.format,
    )  # fmt: skip


def _checkpoint_of(order: OpenOrder) -> CheckpointFact | None:
    """The checkpoint as far as it came; None where a part failed: then nothing of it is left."""
    if not order.saved or order.commit is None:
        return None
    if any(part.error is not None for part in order.saved.values()):
        return None
    first = order.saved[min(order.saved)]
    path = first.path or order.commit.path  # a framework's checkpoint has a place of its own
    return checkpoint_fact(first, path, committed=order.committed, finite=order.is_finite, saved_by=order.saved)


def closed(order: OpenOrder, outcome: Literal["done", "given_up"], reason: str, *, now: float) -> Closed:
    """What came of it."""
    commit, updates = order.commit, {part.updates_applied for part in order.saved.values()}
    stop_step = None
    if commit is not None:
        stop_step = commit.veto if commit.veto is not None else (commit.stop_after or 0) + 1
    return Closed(
        generation=order.generation, kind=order.kind, outcome=outcome, reason=reason, stop_step=stop_step,
        ranks=tuple(sorted(order.left or order.saved)), updates_applied=updates.pop() if len(updates) == 1 else None,
        checkpoint=_checkpoint_of(order), exit_code=order.exit_code if order.leave else None, seconds=now - order.opened_at,
    )  # fmt: skip


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 1`, or the first few of `ranks 0, 1 ...`."""
    known = sorted(ranks)
    return ("rank " if len(known) == 1 else "ranks ") + ", ".join(map(str, known[:8])) + (" ..." if len(known) > 8 else "")
