"""The save of a rescue: the whole state by one rank, as it was after the last update that was applied.

Owns what "as it was" means where a step had begun: buffers, schedulers and generators of the window's start, and the place in the data before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_proto.messages import Commit, Committed, Saved, WriteCommitted
from torch_watchdog_proto.rescue_words import Free, Freed, Holds, Rescue

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.part import Reader
    from torch_watchdog_agent.checkpoint.position import Place
    from torch_watchdog_agent.rank import Rank

__all__ = ["freed", "needed", "reason_here", "save", "seal", "unsaved"]


def needed(rank: Rank) -> object:
    """All that a save is made of: what the script alone holds goes with its frames."""
    from torch_watchdog_agent.checkpoint.save import owners

    return rank.subjects.now(), owners()


def reason_here(rank: Rank, free: Free) -> str:
    """Behind this rank's own number: one that has lost another says so of itself, and is not the one that has failed."""
    return re.sub(rf"^rank {rank.identity.rank}\b", "this rank", free.reason)


def freed(rank: Rank, free: Free, holds: Holds, why: str, updates: int, *, part: tuple[int, int] = (0, 0)) -> Freed:
    """What this rank holds after so many updates, once it has come free. `part`: which one of how many."""
    from torch_watchdog_agent.checkpoint.manifest import newest_committed

    newest = newest_committed(Path(rank.config.run_dir) / "checkpoints") or rank.config.resume or ""
    return Freed(
        rank=rank.identity.rank, generation=free.generation, updates_applied=updates, holds=holds, why=why, newest=str(newest), part=part[0],
        parts=part[1],
    )  # fmt: skip


def save(
    rank: Rank, order: Rescue, *, updates: int, windows_back: Callable[[], int], read: Reader | None = None, part: int | None = None
) -> Saved:
    """The state after so many `updates`, of a training thread that applies none any more. `windows_back`: how many windows it has begun after them. It may
    come to one more meanwhile, with a batch that was on its way to the loop as the place in the data was read: once, for there it stands."""
    from torch_watchdog_agent.checkpoint.save import discard

    place = rank.place()
    before = windows_back()
    at_end = not before and rank.window.is_behind_the_end(updates, place)
    saved = _save(rank, order, updates=updates, place=place, windows_back=before, at_end=at_end, read=read, part=part)
    now = windows_back()
    # What a window keeps that opens while a pass's end is put back is of that end, and neither.
    if now == before or at_end or (saved.path and not before and rank.window.begins_at(place)):
        return saved
    if saved.path:
        discard(Path(saved.path))
    return _save(rank, order, updates=updates, place=place, windows_back=now, at_end=False, read=read, part=part)


def _save(
    rank: Rank, order: Rescue, *, updates: int, windows_back: int, place: Place, at_end: bool, read: Reader | None, part: int | None
) -> Saved:  # fmt: skip
    """Writes and digests; what fails becomes the answer's error. `place`: where in the data that is, where no window was begun; `at_end`: and that is the end
    of a pass: what was there counts; `read`: brings tensors to the host; `part`: which one this rank holds, None: all of it.
    """
    from torch_watchdog_agent.checkpoint.alone import save_alone
    from torch_watchdog_agent.checkpoint.errors import in_words
    from torch_watchdog_agent.checkpoint.part import Alone
    from torch_watchdog_agent.checkpoint.rng import RngState
    from torch_watchdog_agent.checkpoint.save import discard
    from torch_watchdog_agent.saver import say_what_is_not_counted

    if (sealed := _sealed(rank, order.generation, Path(order.path))) is not None:
        return _saved(rank, order, updates, finite=True, format=sealed["format"])
    say_what_is_not_counted(rank)
    try:
        if windows_back and rank.window.begun_after(updates) != windows_back:
            return unsaved(rank, order, updates, "what its step began with is not on hand")
        if windows_back and (why := rank.window.why_no_buffers(updates)):
            return unsaved(rank, order, updates, why)
        rewinds = windows_back > 0 or at_end
        position, rng = (
            (rank.window.position_at(windows_back), rank.window.rng_at(windows_back))
            if rewinds
            else (place.with_generators(RngState.capture()), None)
        )
        is_in_place: Callable[[], bool]
        with rank.window.rewound(windows_back, buffers=windows_back > 0 and read is None) if rewinds else nullcontext(bool) as is_in_place:
            saved = save_alone(
                Path(order.path), rank.subjects, rank=rank.identity.rank, updates_applied=updates,
                position=position, say=rank.say, left_out=rank.quarantine.lines(), read=read, rng=rng,
                part=part, alone=Alone(steps=rank.loop.steps_ended(windows_back), begun=windows_back),
            )  # fmt: skip
            if rewinds and not is_in_place():
                discard(saved.path)
                return unsaved(rank, order, updates, "the training has moved on while its state was being saved")
    except BaseException as error:  # noqa: BLE001  torch's CheckpointException is no Exception; whatever it is must reach the daemon
        return unsaved(rank, order, updates, in_words(error, alone=True))
    return _saved(rank, order, updates, path=str(saved.path), finite=saved.finite, files=saved.files, format=saved.format)


def seal(rank: Rank, asked: Rescue, order: WriteCommitted, saved: Saved, *, parts: int) -> Committed:
    """Once all is written; what was written in `parts` is put together first. 0: it was written whole."""
    from torch_watchdog_agent.checkpoint.errors import in_words
    from torch_watchdog_agent.checkpoint.pieces import join, swept
    from torch_watchdog_agent.checkpoint.save import discard

    place = Path(saved.path)
    if _sealed(rank, order.generation, place) is not None:
        discard(place)  # what was written here of the same
        return Committed(rank=rank.identity.rank, generation=order.generation)
    try:
        if parts:
            order = replace(order, manifest=join(place, order.manifest, parts=parts))
    except BaseException as error:  # noqa: BLE001  torch's CheckpointException is no Exception; whatever it is must reach the daemon
        return Committed(rank=rank.identity.rank, generation=order.generation, error=in_words(error))
    committed = rank.saver.seal(Commit(generation=order.generation, path=asked.path), order, place)
    swept(place)
    return committed


def _sealed(rank: Rank, generation: int, path: Path) -> Mapping[str, Any] | None:
    """The manifest of what another rank has sealed in this very rescue, before it died without a word of it."""
    from torch_watchdog_agent.checkpoint.errors import CheckpointError
    from torch_watchdog_agent.checkpoint.manifest import read_manifest

    try:
        facts = read_manifest(path)
    except (CheckpointError, OSError):
        return None
    ours = {"kind": "rescue", "generation": generation, "session": rank.config.session, "attempt": rank.identity.attempt}
    return facts if ours.items() <= facts.items() else None


def unsaved(rank: Rank, order: Rescue, updates: int, why: str) -> Saved:
    """The answer where nothing was written."""
    return _saved(rank, order, updates, error=why)


def _saved(rank: Rank, order: Rescue, updates: int, **fields: Any) -> Saved:
    return Saved(
        **{"rank": rank.identity.rank, "generation": order.generation, "updates_applied": updates, "path": order.path, **fields}
    )  # fmt: skip
