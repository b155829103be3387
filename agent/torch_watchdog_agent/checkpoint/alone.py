"""One rank writes the whole state, or its piece of it, by itself: for a rescue, where no collective can be run any more.

Owns that nothing in here waits for another rank. A framework's own form where it has one that one rank can write, else that of `dcp.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_watchdog_agent.checkpoint import pieces
from torch_watchdog_agent.checkpoint.part import Alone, Moment, Reader, SavedPart
from torch_watchdog_agent.checkpoint.peers import Peers
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.save import save_as_chosen, save_as_torch, write_left_out
from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_proto.checkpoint_names import beside


def save_alone(
    path: Path,
    subjects: Subjects,
    *,
    rank: int,
    updates_applied: int,
    position: LoaderPosition,
    say: Callable[[str], None],
    alone: Alone | None = None,
    left_out: tuple[str, ...] = (),
    read: Reader | None = None,
    rng: RngState | None = None,
    part: int | None = None,
) -> SavedPart:
    """Write, flush and digest everything. The caller has made sure that this rank holds all of it, or `part` of it. Raises CheckpointError.

    `alone`: where the loop is, for a framework's form; None: torch's form. `read`: as in `Moment`. `rng`: the generators' states; None: as they are now.
    """
    peers = Peers(None, rank=rank, index=0, count=1)
    before = RngState.capture()
    moment = Moment(
        updates_applied=updates_applied, position=position, rng=rng or before, say=say, read=read, is_piece=part is not None, alone=alone
    )
    try:
        if part is not None:
            place = pieces.folder_of(path, part)
            saved = pieces.lifted(save_as_torch(place, subjects, peers, moment), path, part)
        elif alone is not None:
            saved = save_as_chosen(path, subjects, peers, moment)
        else:
            saved = save_as_torch(path, subjects, peers, moment)
        if not part:
            write_left_out(beside(saved.path, "partial"), left_out, peers)
        return saved
    finally:
        before.restore()
