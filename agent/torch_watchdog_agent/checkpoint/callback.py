"""The user's own way of writing a checkpoint, in place of ours.

Owns the one registered function, and finding and digesting the files that it left behind. Our own rank files (generators, position in the
data) are written beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.checkpoint.files import digested, sync
from torch_watchdog_agent.checkpoint.part import SavedPart, empty_folder
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rank_file import RankFile
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects, TrainingState
from torch_watchdog_proto.messages import SavedFile

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.peers import Peers

FORMAT = "callback"

Writer = Callable[[Path], None]
_writer: Writer | None = None


def on_checkpoint(write_checkpoint: Writer) -> Writer:
    """Have `write_checkpoint(folder)` write the checkpoint. It runs on every rank at the boundary; also usable as a decorator.

    The folder is new and empty, and gets its final name once every rank has returned.
    """
    global _writer
    _writer = write_checkpoint
    return write_checkpoint


def registered() -> Writer | None:
    return _writer


def write(
    directory: Path,
    subjects: Subjects,
    peers: Peers,
    *,
    updates_applied: int,
    position: LoaderPosition,
    rng: RngState,
    say: Callable[[str], None],
) -> SavedPart:
    """Run the user's function, then flush and digest what is there. Collective."""
    from torch_watchdog_agent.checkpoint.fingerprint import all_finite

    peers.agree_own(lambda: empty_folder(directory) if peers.first else None)
    say(f"writing the checkpoint with {getattr(_writer, '__qualname__', _writer)}")
    peers.agree_own(lambda: _run_writer(directory))
    mine = RankFile(
        rank=peers.rank,
        world_size=peers.count,
        updates_applied=updates_applied,
        position=position,
        rng=rng,
        finite=all_finite(live_tensors(subjects.now())),
    )
    peers.agree_own(lambda: mine.write(directory))
    names = shared_out(peers.gather(_all_files(directory)), peers.index)
    return SavedPart(files=peers.agree_own(lambda: _digest(directory, names)), finite=mine.finite, format=FORMAT)


def shared_out(listings: Sequence[Sequence[str]], index: int) -> tuple[str, ...]:
    """The files that rank `index` digests: each file exactly once, by one of the ranks that see it (on a shared disk all of them do)."""
    seen_by: dict[str, list[int]] = {}
    for rank, listing in enumerate(listings):
        for name in listing:
            seen_by.setdefault(name, []).append(rank)
    return tuple(name for turn, (name, ranks) in enumerate(sorted(seen_by.items())) if ranks[turn % len(ranks)] == index)


def live_tensors(state: TrainingState) -> Iterator[Any]:
    """Parameters, buffers and optimizer state as this rank holds them."""
    from torch_watchdog_agent.checkpoint.state import local_tensors

    for model in state.models:
        for tensor in (*model.parameters(), *model.buffers()):
            yield from local_tensors(tensor.detach())
    for optimizer in state.optimizers:
        for entries in optimizer.state.values():
            yield from (tensor for value in entries.values() for tensor in local_tensors(value))


def _run_writer(directory: Path) -> None:
    if _writer is not None:
        _writer(directory)


def _all_files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _digest(directory: Path, names: Sequence[str]) -> tuple[SavedFile, ...]:
    for name in names:
        sync(directory / name)
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        sync(folder)
    return tuple(digested(directory, name) for name in names)
