"""Checkpoints whose files somebody else's code writes: a framework's own saving, or the user's function.

Owns running that code on every rank, and flushing and digesting whatever it left behind. Knows no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.files import digested, link_all, sync
from torch_watchdog_agent.checkpoint.manifest import OUR_WORDS
from torch_watchdog_agent.checkpoint.part import Moment, SavedPart, empty_folder
from torch_watchdog_agent.checkpoint.rank_file import RankFile
from torch_watchdog_agent.checkpoint.subjects import Subjects, TrainingState
from torch_watchdog_proto.checkpoint_names import beside
from torch_watchdog_proto.messages import SavedFile

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """`write` runs on every rank with a folder that is new and empty. `path`: where the finished checkpoint belongs.

    `inside`: the subfolder that it writes into, where it insists on a name of its own. `rank_files`: whether ours (generators, position) lie beside its files.
    `models`: those that no hook of ours sees, to be looked at for NaN, too. `is_there`: the framework itself has just written this very checkpoint there.
    """

    format: str
    path: Path
    write: Callable[[Path], None]
    inside: str = ""
    rank_files: bool = True
    by: str = ""
    models: tuple[Any, ...] = ()
    is_there: bool = False


def write(
    writer: Writer,
    subjects: Subjects,
    peers: Peers,
    moment: Moment,
) -> SavedPart:
    """Run the writer, then flush and digest what is there. Collective."""
    from torch_watchdog_agent.checkpoint.fingerprint import all_finite

    directory = beside(writer.path, "partial")
    peers.agree_own(lambda: empty_folder(directory) if peers.first else None)
    if writer.is_there:
        moment.say(f"{writer.by or writer.format} has saved this step itself: its files are verified and marked")
        peers.agree_own(lambda: link_all(writer.path, directory, but=OUR_WORDS) if peers.first else None)
    else:
        _let_write(writer, directory, peers, moment)
    finite = peers.agree_own(lambda: all_finite(map(moment.on_host, live_tensors(subjects.now(), writer.models))))
    if writer.rank_files:
        mine = RankFile(
            rank=peers.rank, world_size=peers.count, updates_applied=moment.updates_applied, position=moment.position, rng=moment.rng, finite=finite
        )  # fmt: skip
        peers.agree_own(lambda: mine.write(directory))
    names = shared_out(peers.gather(_all_files(directory)), peers.index)
    return SavedPart(path=writer.path, files=peers.agree_own(lambda: _digest(directory, names)), finite=finite, format=writer.format)


def _let_write(writer: Writer, directory: Path, peers: Peers, moment: Moment) -> None:
    moment.say(f"writing the checkpoint with {writer.by or writer.format}")
    peers.agree_own(lambda: writer.write(directory))
    if writer.inside:
        peers.agree_own(lambda: _raise_up(directory, writer) if peers.first else None)


def _raise_up(directory: Path, writer: Writer) -> None:
    inside = directory / writer.inside
    if not inside.is_dir():
        raise CheckpointError(f"{writer.by or writer.format} wrote nothing into {inside}: does the script replace how it saves?")
    for path in inside.iterdir():
        path.rename(directory / path.name)
    inside.rmdir()


def shared_out(listings: Sequence[Sequence[str]], index: int) -> tuple[str, ...]:
    """The files that rank `index` digests: each file exactly once, by one of the ranks that see it (on a shared disk all of them do)."""
    seen_by: dict[str, list[int]] = {}
    for rank, listing in enumerate(listings):
        for name in listing:
            seen_by.setdefault(name, []).append(rank)
    return tuple(name for turn, (name, ranks) in enumerate(sorted(seen_by.items())) if ranks[turn % len(ranks)] == index)


def live_tensors(state: TrainingState, more: Sequence[Any] = ()) -> Iterator[Any]:
    """Parameters, buffers and optimizer state as this rank holds them."""
    from torch_watchdog_agent.checkpoint.state import local_tensors

    for model in (*state.models, *more):
        for tensor in (*model.parameters(), *model.buffers()):
            yield from local_tensors(tensor.detach())
    for optimizer in state.optimizers:
        for entries in optimizer.state.values():
            yield from (tensor for value in entries.values() for tensor in local_tensors(value))


@contextmanager
def standing_in(item: Any, **attributes: Any) -> Iterator[None]:
    """`item` has these attributes of its own in the body, and what it had before after it."""
    before = {name: item.__dict__[name] for name in attributes if name in item.__dict__}
    item.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del item.__dict__[name]
        item.__dict__.update(before)


@contextmanager
def on_host(moment: Moment, items: Sequence[Any]) -> Iterator[None]:
    """Whoever asks one of `items` for its `state_dict()` in the body gets it without tensors on a device. What shares memory there does so here."""
    with ExitStack() as stack:
        for item in items if moment.read is not None else ():
            stack.enter_context(standing_in(item, state_dict=_tied(moment.on_host, item.state_dict)))
        yield


def _tied(read: Callable[[Any], Any], state_dict: Callable[..., Any]) -> Callable[..., Any]:
    copies: dict[tuple[Any, ...], Any] = {}

    def host(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)((key, host(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(map(host, value))
        if not hasattr(value, "data_ptr") or not value.numel():
            return read(value)
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        return copies[place] if place in copies else copies.setdefault(place, read(value))

    return lambda *args, **kwargs: host(state_dict(*args, **kwargs))


def own_name(folder: Path, name: str, rank: int) -> None:
    """`name` holds the number of a rank: whoever speaks as the main process has written its own things under that one's number."""
    path = folder / name.format(0)
    if rank and path.exists():
        path.rename(folder / name.format(rank))


def _all_files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _digest(directory: Path, names: Sequence[str]) -> tuple[SavedFile, ...]:
    for name in names:
        sync(directory / name)
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        sync(folder)
    return tuple(digested(directory, name) for name in names)
