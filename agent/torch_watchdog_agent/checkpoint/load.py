"""Reads a checkpoint of `dcp.py` back into living objects.

Owns asking torch for exactly the tensors that the objects need, and putting them in place. Nothing here steps an optimizer: its state is
built from what the checkpoint says it holds. Knows nothing of manifests and positions.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_watchdog_agent.checkpoint.alignment import Shape, mismatch, saved_names
from torch_watchdog_agent.checkpoint.errors import RestoreError
from torch_watchdog_agent.checkpoint.state import (
    from_leaf,
    fsdp1_model,
    loose_tensors,
    model_tensors,
    numbered,
    numbered_state,
    parameter_names,
    params_held,
    sharded_fsdp1,
    with_lists,
)
from torch_watchdog_agent.checkpoint.subjects import TrainingState, parameters_in_order


class Stored:
    """The checkpoint at `path` as torch sees it: `tensors` by name (shape and dtype), `small` everything else, already read.

    `own` are this rank's tensors, `values` its small objects, from its rank file; they come before what torch's files have under the same name.
    """

    def __init__(self, path: Path, *, group: Any | None, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.path = path
        self._group = group
        self._own = own
        metadata = torch_dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        self.tensors = {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
        self.small: dict[str, Any] = {name: None for name in metadata if name not in self.tensors and name not in own}
        self._load(self.small)
        self.small |= values

    def under(self, place: str) -> dict[str, Shape]:
        """The names below `place`, with their shapes."""
        start = f"{place}."
        shapes: dict[str, Shape] = {name: tuple(entry.size) for name, entry in self.tensors.items() if name.startswith(start)}
        shapes |= {name: None for name in self.small if name.startswith(start)}
        shapes |= {name: tuple(tensor.shape) for name, tensor in self._own.items() if name.startswith(start)}
        return {name.removeprefix(start): shape for name, shape in shapes.items()}

    def places(self, kind: str) -> list[str]:
        """`optimizer`, `optimizer_1`, ... as far as there are any."""
        names = {name.split(".", 1)[0] for name in (*self.tensors, *self.small)}
        return [place for index in range(len(names)) if (place := numbered(kind, index)) in names]

    def fill(self, wanted: dict[str, Any]) -> None:
        """Read into the tensors of `wanted`, in place. Collective."""
        with torch.no_grad():
            for name in wanted.keys() & self._own.keys():
                wanted[name].copy_(self._own[name])
        self._load({name: tensor for name, tensor in wanted.items() if name in self.tensors and name not in self._own})

    def room_for(self, name: str, like: Any) -> Any:
        """An empty tensor for the stored one: sharded as `like` is where it has the shape of it, a plain one otherwise."""
        stored = self._own.get(name)
        shape = tuple(self.tensors[name].size) if stored is None else tuple(stored.shape)
        dtype = self.tensors[name].properties.dtype if stored is None else stored.dtype
        if shape != tuple(like.size()):
            return torch.empty(shape, dtype=dtype, device="cpu")
        return _sharded_like(like, dtype) if hasattr(like, "local_shards") else torch.empty_like(like, dtype=dtype, requires_grad=False)

    def _load(self, wanted: dict[str, Any]) -> None:
        torch_dcp.load(wanted, storage_reader=torch_dcp.FileSystemReader(self.path), process_group=self._group)


def load_state(stored: Stored, target: TrainingState) -> None:
    """Put everything that `target` names in place. Collective; raises RestoreError where the two do not fit."""
    renamed = _load_models(stored, target)
    names = {key: renamed.get(name, name) for key, name in parameter_names(target).items()}
    loose = loose_tensors(target, names)
    stored.fill({f"loose.{name}": tensor for name, tensor in loose.items()})
    free = stored.places("optimizer")
    for optimizer in target.optimizers:
        sharded = fsdp1_model(optimizer, target.models)
        if sharded is None:
            _load_optimizer(stored, optimizer, names, free)
        else:
            _load_fsdp1_optimizer(stored, optimizer, sharded, free)
    _load_in_order(stored, "scheduler", target.schedulers)
    _load_in_order(stored, "scaler", target.scalers)


def _load_models(stored: Stored, target: TrainingState) -> dict[str, str]:
    """Load each model; returns the parameter names of the target by those of the checkpoint (see `parameter_names`)."""
    free = {place: stored.under(place) for place in stored.places("model")}
    renamed: dict[str, str] = {}
    for index, model in enumerate(target.models):
        live = model_tensors(model)
        place, names = _place_of(stored, free, live)
        wanted = {f"{place}.{names[name]}": tensor for name, tensor in live.items() if isinstance(tensor, torch.Tensor)}
        stored.fill(wanted)
        values = {name: wanted.get(f"{place}.{names[name]}", stored.small.get(f"{place}.{names[name]}")) for name in live}
        set_model_state_dict(model, {name: from_leaf(value) for name, value in values.items()})
        target_start = "" if index == 0 else f"{numbered('model', index)}/"
        saved_start = "" if place == "model" else f"{place}/"
        renamed |= {target_start + name: saved_start + saved for name, saved in names.items()}
        free[place] = {name: shape for name, shape in free[place].items() if name not in set(names.values())}
    return renamed


def _place_of(stored: Stored, free: Mapping[str, Mapping[str, Shape]], live: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    wanted: dict[str, Shape] = {name: tuple(value.size()) if isinstance(value, torch.Tensor) else None for name, value in live.items()}
    for place, saved in free.items():
        names = saved_names(saved, wanted)
        if names is not None:
            return place, names
    why = mismatch(next(iter(free.values()), {}), wanted)
    if not free or not any(free.values()):
        advice = "A model that no optimizer trains (an average, a teacher) is in none of ours: leave it out, and save it by yourself"
        raise RestoreError(stored.path, "each model that it holds has been taken by those before this one", advice)
    raise RestoreError(
        stored.path, f"it holds another model: {why}", "Build the model as the run that saved it did, before calling restore()"
    )


def _load_optimizer(stored: Stored, optimizer: Any, names: Mapping[int, str], free: list[str]) -> None:
    groups = numbered_state(optimizer)["param_groups"]
    params = parameters_in_order(optimizer)
    numbers = [number for group in groups for number in group["params"]]
    place, saved_groups = _groups_of(stored, free, [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups])
    state = _room_for_state(stored, place, {names[id(param)]: param for param in params_held(optimizer)})
    by_number = {number: state[names[id(param)]] for number, param in zip(numbers, params, strict=True) if names[id(param)] in state}
    merged = [{**now, **saved, "params": now["params"]} for now, saved in zip(groups, saved_groups, strict=True)]
    optimizer.load_state_dict({"state": by_number, "param_groups": merged})


def _load_fsdp1_optimizer(stored: Stored, optimizer: Any, model: Any, free: list[str]) -> None:
    if not free:
        raise _no_optimizer(stored, "it holds fewer optimizers than restore() was given")
    place = free.pop(0)
    state = _room_for_state(stored, place, model_tensors(model))
    named = {"state": state, "param_groups": _saved_groups(stored, place)}
    with sharded_fsdp1(model):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, named)
    optimizer.load_state_dict(flat)


def _room_for_state(stored: Stored, place: str, params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The stored state of `params` by parameter name, read; a parameter that was never updated is not in it."""
    start = f"{place}.state."
    state: dict[str, dict[str, Any]] = {}
    wanted: dict[str, Any] = {}
    for key in stored.under(f"{place}.state"):
        name, _, entry = key.rpartition(".")
        if name not in params:
            continue
        full = start + key
        value = from_leaf(stored.small[full]) if full in stored.small else stored.room_for(full, params[name])
        state.setdefault(name, {})[entry] = value
        if full not in stored.small:
            wanted[full] = value
    stored.fill(wanted)
    return {name: with_lists(entries) for name, entries in state.items()}


def _groups_of(stored: Stored, free: list[str], params: list[list[str]]) -> tuple[str, list[dict[str, Any]]]:
    for place in free:
        groups = _saved_groups(stored, place)
        if [group["params"] for group in groups] == params:
            free.remove(place)
            return place, groups
    raise _no_optimizer(stored, "no optimizer in it has the same parameters in the same groups")


def _no_optimizer(stored: Stored, why: str) -> RestoreError:
    return RestoreError(stored.path, why, "Build the optimizer from the same parameters, in the same groups, as the run that saved it did")


def _saved_groups(stored: Stored, place: str) -> list[dict[str, Any]]:
    start = f"{place}.param_groups."
    tensors = {name: stored.room_for(name, torch.empty(0, device="cpu")) for name in stored.tensors if name.startswith(start)}
    stored.fill(tensors)
    groups: dict[int, dict[str, Any]] = {}
    for name, value in {**stored.small, **tensors}.items():
        if name.startswith(start):
            index, key = name.removeprefix(start).split(".", 1)
            groups.setdefault(int(index), {})[key] = from_leaf(value)
    return [groups[index] for index in sorted(groups)]


def _load_in_order(stored: Stored, kind: str, items: tuple[Any, ...]) -> None:
    places = stored.places(kind)
    if len(places) != len(items):
        fewer_or_more = f"it holds {len(places)} {kind} state(s), restore() was given {len(items)}"
        advice = f"Pass {kind}= the same {kind}s, in the order in which the run that saved made them"
        if len(places) < len(items):
            advice += f"; one that is no {kind} of torch's was not seen there: leave it out, and bring it to its place yourself"
        raise RestoreError(stored.path, fewer_or_more, advice)
    for place, item in zip(places, items, strict=True):
        item.load_state_dict(from_leaf(stored.small[place]))


def _sharded_like(like: Any, dtype: Any) -> Any:
    """FSDP1 hands out ShardedTensor: an empty one with the same shards."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    metadata = copy.deepcopy(like.metadata())
    metadata.tensor_properties = dataclasses.replace(metadata.tensor_properties, dtype=dtype)
    shards = [Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in like.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=like._process_group)
