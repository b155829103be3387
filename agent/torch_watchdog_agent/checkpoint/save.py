"""Writes this rank's part of a checkpoint at a boundary: the user's own function where there is one, torch's distributed checkpoint otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_watchdog_agent.checkpoint.part import SavedPart
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects

SAVE_TIMEOUT_S = 300.0  # how long a rank waits for the slowest one's part


def save_at(
    directory: Path,
    subjects: Subjects,
    *,
    updates_applied: int,
    position: LoaderPosition,
    rng: RngState,
    rank: int,
    world_size: int,
    say: Callable[[str], None],
    timeout_s: float = SAVE_TIMEOUT_S,
) -> SavedPart:
    """Collective over all ranks: write into `directory` (a temporary name, made anew), flush, digest. Raises CheckpointError on all or none.

    The training is as it was afterwards: no optimizer is stepped, generators are put back.
    """
    from torch_watchdog_agent.checkpoint import callback, dcp
    from torch_watchdog_agent.checkpoint.guard import marked_busy
    from torch_watchdog_agent.checkpoint.peers import peers_of

    write = dcp.write if callback.registered() is None else callback.write
    before = RngState.capture()
    try:
        with marked_busy(), peers_of(rank, world_size, timeout_s=timeout_s) as peers:
            return write(directory, subjects, peers, updates_applied=updates_applied, position=position, rng=rng, say=say)
    finally:
        before.restore()
