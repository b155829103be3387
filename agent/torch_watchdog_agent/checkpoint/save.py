"""Writes this rank's part of a checkpoint at a boundary, in the form that the user resumes from.

Owns the choice of that form, and that nothing half written is left behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.errors import CheckpointError, in_words
from torch_watchdog_agent.checkpoint.foreign import Writer
from torch_watchdog_agent.checkpoint.part import Moment, RankPart, SavedPart
from torch_watchdog_agent.checkpoint.peers import Peers, RollCall, all_come, peers_of
from torch_watchdog_agent.checkpoint.places import note_elsewhere
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.refusals import by_trying, is_named
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_proto.checkpoint_names import beside

SCANT_BYTES = 1 << 20  # what a failed write leaves of a full disk is less than one of its blocks
SAVE_TIMEOUT_S = 300.0  # how long a rank waits for the slowest one's part


def save_at(
    path: Path,
    subjects: Subjects,
    *,
    updates_applied: int,
    position: LoaderPosition,
    rng: RngState,
    rank: int,
    world_size: int,
    say: Callable[[str], None],
    left_out: tuple[str, ...] = (),
    timeout_s: float = SAVE_TIMEOUT_S,
    call: RollCall | None = None,
) -> SavedPart:
    """Collective over all ranks: write, flush, digest; raises CheckpointError on all or none. The part says where the whole belongs.

    `path`: where it belongs unless a framework has a place of its own. It lies beside that, as `partial.NAME`, until it is committed. `left_out`: the lines
    of the quarantine. `call`: tells that all have come. The training is as it was afterwards: no optimizer is stepped, generators are put back.
    """
    before = RngState.capture()
    try:
        if call is not None:
            all_come(call, world_size, timeout_s=timeout_s)
        with peers_of(rank, world_size, timeout_s=timeout_s) as peers:
            part = save_as_chosen(path, subjects, peers, Moment(updates_applied=updates_applied, position=position, rng=rng, say=say))
            write_left_out(beside(part.path, "partial"), left_out, peers)
            mine = RankPart(rank=rank, updates_applied=updates_applied, finite=part.finite, files=part.files)
            return replace(part, of_all=tuple(peers.gather(mine)))
    finally:
        before.restore()


def chosen(path: Path, subjects: Subjects, moment: Moment) -> Writer | None:
    """Whose code writes it: the user's function, else the framework that owns the loop. None: torch's distributed checkpoint.

    A rank that writes alone does not run the user's function, nor DeepSpeed's: both speak to the other ranks, or leave the writing to rank 0.
    """
    from torch_watchdog_agent.checkpoint import by_accelerate, by_deepspeed, by_lightning, by_trainer, callback

    if by_trainer.trainers():  # which has an Accelerator of its own inside
        framework = by_trainer.writer(moment)
    else:
        framework = by_lightning.writer(path, moment) or by_accelerate.writer(path, subjects, moment)
    if moment.alone is not None:
        return framework
    return callback.writer(path) or framework or by_deepspeed.writer(path)


def owners() -> list[Any]:
    """What a framework's own form is written from: an exception that unwinds the training must not take it with it."""
    from torch_watchdog_agent.checkpoint import by_accelerate, by_lightning, by_trainer

    return [*by_trainer.trainers(), *by_lightning.trainers(), *by_accelerate.accelerators()]


def save_as_chosen(path: Path, subjects: Subjects, peers: Peers, moment: Moment) -> SavedPart:
    """In the form that the user resumes from, else in torch's."""
    from torch_watchdog_agent.checkpoint import callback, foreign

    writer = _agreed(path, subjects, peers, moment)
    if writer is not None:
        if peers.first:
            note_elsewhere(writer.path, path)
        try:
            return without_trace(writer.path, peers, lambda: foreign.write(writer, subjects, peers, moment))
        except CheckpointError as error:
            if writer.format == callback.FORMAT:
                raise
            moment.say(f"{writer.by} could not write the checkpoint ({error}); writing it with torch.distributed.checkpoint instead")
    return save_as_torch(path, subjects, peers, moment)


def save_as_torch(path: Path, subjects: Subjects, peers: Peers, moment: Moment) -> SavedPart:
    """By torch's distributed checkpoint."""
    from torch_watchdog_agent.checkpoint import dcp

    return without_trace(path, peers, lambda: dcp.write(path, subjects, peers, moment))


def _agreed(path: Path, subjects: Subjects, peers: Peers, moment: Moment) -> Writer | None:
    """The same choice on every rank, or none: a framework of another version, with other insides, is passed over."""
    writer: Writer | None = None
    try:
        writer = chosen(path, subjects, moment)
    except Exception as error:  # noqa: BLE001  whatever such a framework raises
        moment.say(f"the framework's own checkpoint cannot be used ({type(error).__name__}: {error})")
    choices = set(peers.gather(None if writer is None else (writer.format, str(writer.path))))
    is_there = all(peers.gather(writer is not None and writer.is_there))
    return replace(writer, is_there=is_there) if writer is not None and len(choices) == 1 else None


def without_trace(path: Path, peers: Peers, write: Callable[[], SavedPart]) -> SavedPart:
    """What fails leaves nothing behind that a person could take for a checkpoint."""
    try:
        return write()
    except BaseException as error:
        full = _full_disk(path) or _refused(path, error)  # while the half that was written still fills it
        if peers.first:
            discard(path)
        if full and not isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise CheckpointError(f"{full} ({in_words(error)})") from error
        raise


def _full_disk(path: Path) -> str:
    """In words, where it is full: torch's own error speaks of positions in a file then."""
    with suppress(OSError):
        left = shutil.disk_usage(beside(path, "partial")).free
        return f"the disk is full: {left:,} bytes are left for {path.parent}" if left < SCANT_BYTES else ""
    return ""


def _refused(path: Path, error: BaseException) -> str:
    """In words, where torch's own error, or another library's, names no error of the system's."""
    return "" if is_named(in_words(error)) else by_trying(beside(path, "partial"), SCANT_BYTES)


def discard(path: Path) -> None:
    """Removes what was written of a checkpoint that will never be at `path`."""
    with suppress(OSError):
        shutil.rmtree(beside(path, "partial"))


def write_left_out(directory: Path, lines: tuple[str, ...], peers: Peers) -> None:
    """Not among the digested files: the user may remove it, once the samples are mended."""
    from torch_watchdog_agent.checkpoint.files import sync
    from torch_watchdog_agent.quarantine import FILE_NAME

    every = sorted({line for lines_of_rank in peers.gather(lines) for line in lines_of_rank})
    if every and peers.first:
        file = directory / FILE_NAME
        file.write_text("".join(f"{line}\n" for line in every))
        sync(file)
