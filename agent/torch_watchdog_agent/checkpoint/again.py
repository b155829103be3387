"""Where a later attempt of one launch begins (`--max-restarts`): at the newest good checkpoint that the launch itself has made.

Owns the choice, and that every rank makes the same one. What a framework resumes by itself is left to the script.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.checkpoint import by_accelerate, by_deepspeed, callback, dcp
from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.manifest import Checkpoint, finished, read_manifest, verify_files
from torch_watchdog_agent.checkpoint.rank_file import RankFile
from torch_watchdog_agent.identity import Identity
from torch_watchdog_proto.sentences import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_watchdog_agent.checkpoint.peers import Peers

_LOADED_BY_RESTORE = (dcp.FORMAT, by_accelerate.FORMAT, by_deepspeed.FORMAT)


def attempt_of_this_launch() -> int:
    """0 for the first."""
    return Identity.from_env(os.environ).attempt


def newest_of_this_run(run_dir: Path, peers: Peers, *, loads: bool, needs_position: bool, say: Callable[[str], None]) -> Path | None:
    """The newest good one that a restore() of this kind can take; the same on every rank. Collective.

    `loads`: it is asked for the state of a model; else a script loads that itself. `needs_position`: for the place in the data, too.
    """
    speaks = say if peers.first else (lambda _: None)
    attempt = attempt_of_this_launch()
    all_of_them = _newest_first(run_dir)
    mine = [str(one.path) for one in all_of_them if _fits(one.path, peers.count, loads=loads, needs_position=needs_position)]
    if any(found != mine for found in peers.gather(mine)):
        speaks(f"attempt {attempt}: not every node sees the checkpoints of this run, so none of them is taken")
        return None
    if all_of_them and [str(all_of_them[0].path)] != mine[:1]:
        newest = all_of_them[0].path
        speaks(
            f"attempt {attempt}: {newest} is not what this restore() can take (written in another form, by another number of ranks, by a loop that takes "
            "from several loaders in turn, or damaged)"
        )
    for path in map(Path, mine):
        if all(peers.gather(_is_whole(path, peers))):
            updates = read_manifest(path)["updates_applied"]
            speaks(f"attempt {attempt} goes on from {path}, the newest good checkpoint of this run ({count(updates, 'update')})")
            return path
        speaks(f"attempt {attempt}: {path} is damaged, so it is not taken")
    return None


def _newest_first(run_dir: Path) -> list[Checkpoint]:
    try:
        return [one for one in reversed(finished(run_dir / "checkpoints")) if one.good]
    except OSError:
        return []


def _is_whole(path: Path, peers: Peers) -> bool:
    """Of this rank's share of the files: together the ranks have looked at each."""
    try:
        verify_files(path, read_manifest(path)["files"][peers.index :: peers.count])
    except (CheckpointError, OSError, KeyError, TypeError):
        return False
    return True


def _fits(path: Path, ranks: int, *, loads: bool, needs_position: bool) -> bool:
    """A model that stays as it was made, beside a place far on in the data, would be worse than a beginning from nothing."""
    try:
        manifest = read_manifest(path)
        by_restore = manifest["format"] in _LOADED_BY_RESTORE
        of_this_kind = by_restore if loads else manifest["format"] == callback.FORMAT
        if not of_this_kind or not needs_position:
            return bool(of_this_kind)
        return manifest["world_size"] == ranks and not _was_in_turn(path, manifest)
    except (CheckpointError, OSError, KeyError):
        return False


def _was_in_turn(path: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        return RankFile.read(path, min(manifest["ranks"])).position.in_turn
    except (OSError, KeyError, ValueError):
        return False  # what is missing or damaged is found where files are verified
