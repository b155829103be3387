"""Checkpoints through `torch.distributed.checkpoint`: every rank writes its shards, replicated tensors are shared out.

Owns what goes where: model, optimizer, scheduler, scaler into torch's own files, readable with torch alone; generators, position and
what differs between ranks into `rank-R.*`. Knows nothing of orders, manifests or names of finished checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_dcp

from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.files import digested, sync
from torch_watchdog_agent.checkpoint.fingerprint import all_finite, fingerprint
from torch_watchdog_agent.checkpoint.part import Moment, SavedPart, empty_folder
from torch_watchdog_agent.checkpoint.peers import Peers
from torch_watchdog_agent.checkpoint.pieces import PiecePlanner
from torch_watchdog_agent.checkpoint.rank_file import RankFile
from torch_watchdog_agent.checkpoint.refusals import refusal
from torch_watchdog_agent.checkpoint.state import from_leaf, gather_state, is_plain_tensor, local_tensors
from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_proto.checkpoint_names import beside

FORMAT = "dcp"


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings from torch's checkpoint code: they are about its own calls and mean nothing to the person who trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(
    path: Path,
    subjects: Subjects,
    peers: Peers,
    moment: Moment,
) -> SavedPart:
    """Write, flush and digest this rank's part. Collective."""
    directory = beside(path, "partial")
    peers.agree_own(lambda: empty_folder(directory) if peers.first else None)
    with quietly():
        state, left_out = peers.agree_own(lambda: gather_state(subjects.now()))
    if (read := moment.read) is not None:
        state = peers.agree_own(lambda: {name: read(value) for name, value in state.items()})
    for line in left_out:
        moment.say(f"not in the checkpoint: {line}")
    shared, own = split_own(state, peers)
    values = {name: from_leaf(value) for name, value in own.items() if not is_plain_tensor(value)}
    _write_shared(shared, directory, peers, moment)
    mine = RankFile(
        rank=peers.rank,
        world_size=peers.count,
        updates_applied=moment.updates_applied,
        position=moment.position,
        rng=moment.rng,
        finite=all_finite(tensor for value in state.values() for tensor in local_tensors(value)),
        own={name: tensor for name, tensor in own.items() if name not in values},
        values=values,
        not_covered=subjects.not_covered() + left_out,
    )
    files = peers.agree_own(lambda: _finish(mine, directory, peers))
    return SavedPart(path=path, files=files, finite=mine.finite, format=FORMAT, not_covered=mine.not_covered)


def split_own(state: Mapping[str, Any], peers: Peers) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the ranks share, what is this rank's own).

    torch writes one copy of a tensor that several ranks hold whole, whichever rank's. Where the copies differ, the lowest rank's goes
    there and every other rank keeps its own, so that nothing is lost and torch alone still finds a complete checkpoint.
    """
    prints = peers.agree_own(lambda: {name: found for name, value in state.items() if (found := _print(value)) is not None})
    if len(set(peers.gather(hashlib.sha256(repr(sorted(prints.items())).encode()).hexdigest()))) == 1:
        return dict(state), {}
    by_rank = peers.gather(prints)
    own = {name: state[name] for name in prints if _is_own(name, by_rank, peers.index)}
    return {name: value for name, value in state.items() if name not in own}, own


def _print(value: Any) -> tuple[Any, ...] | None:
    """What tells two ranks' values apart; None for what cannot be a rank's own: shards, and objects that JSON would not give back as they are."""
    if is_plain_tensor(value):
        return fingerprint(value)
    small = from_leaf(value)
    try:
        text = json.dumps(small)
        return (text,) if json.loads(text) == small else None
    except (TypeError, ValueError):
        return None


def _is_own(name: str, by_rank: list[dict[str, Any]], index: int) -> bool:
    holders = [rank for rank, prints in enumerate(by_rank) if name in prints]
    return index != holders[0] and any(by_rank[rank][name] != by_rank[holders[0]][name] for rank in holders)


class _Writer(torch_dcp.FileSystemWriter):  # type: ignore[misc]
    """What the system refused is put into words where it happens: torch sends the other ranks what was raised over it, and that alone."""

    def write_data(self, *args: Any, **named: Any) -> Any:
        with _in_words():
            return super().write_data(*args, **named)

    def finish(self, *args: Any, **named: Any) -> None:
        with _in_words():
            super().finish(*args, **named)


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        why = refusal(error)
        if not why:
            raise
        raise CheckpointError(why) from error


def _write_shared(shared: dict[str, Any], directory: Path, peers: Peers, moment: Moment) -> None:
    """Where the tensors were brought to the host torch's writer must not use the device, whose stream may be stuck: it does so to copy ahead."""
    writer = _Writer(directory, **({"per_thread_copy_ahead": 0} if moment.read is not None else {}))
    with quietly():
        # One rank alone: also where a process group is there, which no rank may answer any more. The name that torch 2.4 has for this, too.
        if peers.count == 1:
            torch_dcp.save_state_dict(shared, writer, no_dist=True, planner=PiecePlanner() if moment.is_piece else None)
        else:
            torch_dcp.save(shared, storage_writer=writer, process_group=peers.group)


def _finish(mine: RankFile, directory: Path, peers: Peers) -> tuple[Any, ...]:
    mine.write(directory)
    sync(directory)
    names = [f"rank-{mine.rank}.json", f"rank-{mine.rank}.safetensors"]
    names += sorted(path.name for path in directory.glob(f"__{peers.index}_*.distcp"))
    names += [".metadata"] if peers.first else []
    return tuple(digested(directory, name) for name in names)
