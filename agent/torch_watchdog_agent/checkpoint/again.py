"""Where a later attempt of one launch begins (`--max-restarts`): at the newest good checkpoint that the launch itself has made.

Owns the choice, and that every rank makes the same one. What a framework resumes by itself is left to the script.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch_watchdog_agent.checkpoint import by_accelerate, by_deepspeed, callback, dcp
from torch_watchdog_agent.checkpoint.manifest import Checkpoint, finished, read_manifest
from torch_watchdog_agent.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_watchdog_agent.checkpoint.peers import Peers

_LOADED_BY_RESTORE = (dcp.FORMAT, by_accelerate.FORMAT, by_deepspeed.FORMAT)


def attempt_of_this_launch() -> int:
    """0 for the first."""
    return Identity.from_env(os.environ).attempt


def newest_of_this_run(run_dir: Path, peers: Peers, *, loads: bool, needs_position: bool, say: Callable[[str], None]) -> Path | None:
    """The newest good one that a restore() of this kind can take; the same on every rank. Collective.

    `loads`: it is asked for the state of a model; else a script loads that itself. `needs_position`: for the place in the data, too.
    """
    mine = next((one for one in _newest_first(run_dir) if _fits(one.path, peers.count, loads=loads, needs_position=needs_position)), None)
    found = set(peers.gather(None if mine is None else str(mine.path)))
    speaks = say if peers.first else (lambda _: None)
    attempt = attempt_of_this_launch()
    if len(found) > 1:
        speaks(f"attempt {attempt}: not every node sees the checkpoints of this run, so none of them is taken")
        return None
    newest = next(iter(_newest_first(run_dir)), None)
    if newest is not None and newest != mine:
        speaks(
            f"attempt {attempt}: {newest.path} is not what this restore() can take (written in another form, or by another number of ranks)"
        )
    if mine is None:
        return None
    speaks(f"attempt {attempt} goes on from {mine.path}, the newest good checkpoint of this run ({mine.updates_applied} updates)")
    return mine.path


def _newest_first(run_dir: Path) -> list[Checkpoint]:
    return [one for one in reversed(finished(run_dir / "checkpoints")) if one.good]


def _fits(path: Path, ranks: int, *, loads: bool, needs_position: bool) -> bool:
    """A model that stays as it was made, beside a place far on in the data, would be worse than a beginning from nothing."""
    manifest = read_manifest(path)
    by_restore = manifest["format"] in _LOADED_BY_RESTORE
    of_this_kind = by_restore if loads else manifest["format"] == callback.FORMAT
    return of_this_kind and (manifest["world_size"] == ranks or not needs_position)
