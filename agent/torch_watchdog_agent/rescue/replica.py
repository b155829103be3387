"""Does this rank hold the whole training state? Said of one moment, without a collective.

Owns the rule: only what is known to be the same on every rank may be saved by one of them. Everything else is a part, with the reason in words.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_watchdog_agent.checkpoint.subjects import TrainingState, parameters_of
from torch_watchdog_agent.hooks.groups import living
from torch_watchdog_proto.rescue_words import Holds

__all__ = ["holdings", "part_of", "wrapped"]

_SHARDED_OPTIMIZERS = frozenset({"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DeepSpeedZeroOptimizer"})
_replicated: weakref.WeakKeyDictionary[Any, _Replica] = weakref.WeakKeyDictionary()  # by the model in the wrapper


@dataclass(slots=True)
class _Replica:
    """A model in a DistributedDataParallel over `ranks`. `bare_since`: after how many updates that was taken off; None while it is on."""

    ranks: int
    bare_since: int | None = None


def wrapped(wrapper: Any, updates: Callable[[], int]) -> None:
    """A DistributedDataParallel was made. Its group may be destroyed by the time that its size is asked for; and it itself may be: Lightning takes it off
    while an exception unwinds. What no update has changed since is what it was. `updates`: how many have been applied.
    """
    replica = _replicated[wrapper.module] = _Replica(int(wrapper.process_group.size()))

    def taken_off() -> None:
        replica.bare_since = updates()

    weakref.finalize(wrapper, taken_off).atexit = False


def holdings(state: TrainingState, *, world_size: int, updates: int) -> tuple[Holds, str]:
    """Whether the whole of `state`, after so many updates, is here, and if not why."""
    if not state.optimizers or not state.models:
        return "nothing", "no optimizer that a checkpoint of ours can hold was seen"
    parameters = list(parameters_of(state.optimizers).values())
    sharded = _why_sharded(state, parameters)
    if sharded:
        return "part", sharded
    if world_size == 1:
        return ("part", "it is one of several processes, which this launch knows nothing of") if _has_peers() else ("all", "")
    replicas = [model for model, one in _replicated.items() if one.ranks == world_size and one.bare_since in (None, updates)]
    covered = {id(param) for model in replicas for param in model.parameters()}
    if all(id(param) in covered for param in parameters):
        return "all", ""
    return "part", "not every parameter is in a DistributedDataParallel over all ranks, so no rank is known to hold the whole state"


def part_of(state: TrainingState, *, world_size: int) -> tuple[int, int]:
    """(which part, of how many) where every parameter is sharded alike over some of the ranks and repeated over others (HSDP); (0, 0) where not.

    (0, 1): copies on every rank, each of them sharded over itself alone, as with HSDP over nodes of one GPU each.
    """
    parts = {_part_of(param, world_size) for param in parameters_of(state.optimizers).values()}
    return parts.pop() if len(parts) == 1 else (0, 0)


def _part_of(param: Any, world_size: int) -> tuple[int, int]:
    mesh = getattr(param, "device_mesh", None)
    at = mesh.get_coordinate() if mesh is not None else None
    if mesh is None or at is None or mesh.size() != world_size:
        return 0, 0
    part, parts, is_sharded = 0, 1, False
    for size, index, placement in zip(mesh.shape, at, param.placements, strict=True):
        if placement.is_shard():
            part, parts, is_sharded = part * size + index, parts * size, True
        elif not placement.is_replicate():
            return 0, 0
    return (part, parts) if is_sharded and parts < world_size else (0, 0)


def _why_sharded(state: TrainingState, parameters: list[Any]) -> str:
    names = {type(optimizer).__name__ for optimizer in state.optimizers}
    if names & _SHARDED_OPTIMIZERS:
        return f"{sorted(names & _SHARDED_OPTIMIZERS)[0]} spreads its state over the ranks"
    if any(hasattr(param, "to_local") and not all(place.is_replicate() for place in param.placements) for param in parameters):
        return "FSDP (or tensor parallelism) shards the parameters: the failed rank's shard is gone"
    if any(_is_fsdp1(module) for model in state.models for module in model.modules()):
        return "FSDP shards the parameters: the failed rank's shard is gone"
    return ""


def _has_peers() -> bool:
    """Whether this process, which its launcher started alone, has joined others by itself."""
    return any(group.size() > 1 for group in living())


def _is_fsdp1(module: Any) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"
