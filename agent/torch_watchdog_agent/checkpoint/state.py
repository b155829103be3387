"""The training state as one flat mapping from names to tensors and small objects, and back.

Owns the names that a checkpoint uses (`model.layer.weight`, `optimizer.state.layer.weight.exp_avg`, `optimizer.param_groups`, ...; a second
model or optimizer is `model_1`, `optimizer_1`). Knows plain, DDP, FSDP1 and FSDP2 modules; knows nothing of files.

torch's own helpers for optimizer state run `optimizer.step()` where an optimizer has no state yet. Nothing here ever steps: the names come
from the modules, the state from `Optimizer.state_dict()` (for FSDP1 from `FullyShardedDataParallel.optim_state_dict`, which does not step either).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.nn.parallel import DistributedDataParallel

from torch_watchdog_agent.checkpoint.subjects import TrainingState, parameters_in_order

_ACTIVATION_WRAPPER = "_checkpoint_wrapped_module"
_COMPILED = "_orig_mod"
_SPREAD = "ZeroRedundancyOptimizer"
_LENGTH = "length"


def numbered(kind: str, index: int) -> str:
    """`model`, `model_1`, `model_2`: the first keeps the name that torch's own examples use."""
    return kind if index == 0 else f"{kind}_{index}"


def gather_state(state: TrainingState) -> tuple[dict[str, Any], tuple[str, ...]]:
    """All of the state by name, tensors not copied, and what had to be left out, in words."""
    found: dict[str, Any] = {}
    for index, model in enumerate(state.models):
        found |= _prefixed(numbered("model", index), model_tensors(model))
    names = parameter_names(state)
    for index, optimizer in enumerate(state.optimizers):
        found |= _optimizer_entries(numbered("optimizer", index), optimizer, names, state)
    found |= _prefixed("loose", loose_tensors(state, names))
    left_out: list[str] = []
    for kind, items in (("scheduler", state.schedulers), ("scaler", state.scalers)):
        for index, item in enumerate(items):
            entry = item.state_dict()
            if _can_be_written(entry):
                found[numbered(kind, index)] = as_leaf(entry)
            else:
                left_out.append(f"{kind} {type(item).__name__}: its state_dict() holds objects that cannot be written")
    return found, tuple(left_out)


def model_tensors(model: Any) -> dict[str, Any]:
    """The model's own state dict, names free of wrappers; the tensors are the living ones."""
    return dict(get_model_state_dict(model))


def parameter_names(state: TrainingState) -> dict[int, str]:
    """The name of each parameter by its id, as its model's state has it, `MODEL/` before it for all but the first model."""
    names: dict[int, str] = {}
    for index, model in enumerate(state.models):
        place = "" if index == 0 else f"{numbered('model', index)}/"
        for param, name in _walk(model, ""):
            names.setdefault(id(param), place + name)
    for index, optimizer in enumerate(state.optimizers):
        for position, param in enumerate(parameters_in_order(optimizer)):
            names.setdefault(id(param), f"loose/{index}.{position}")
    return names


def loose_tensors(state: TrainingState, names: Mapping[int, str]) -> dict[str, Any]:
    """Parameters that an optimizer holds and no module does (a temperature, a prompt), by the name that `parameter_names` gave them."""
    params = (param for optimizer in state.optimizers for param in parameters_in_order(optimizer))
    return {name.removeprefix("loose/"): param.detach() for param in params if (name := names[id(param)]).startswith("loose/")}


def _walk(module: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    for name, param in module._parameters.items():
        if param is not None:
            yield param, prefix + name
    for name, child in module._modules.items():
        if child is None:
            continue
        wrapper = (isinstance(module, DistributedDataParallel) and name == "module") or name in (_ACTIVATION_WRAPPER, _COMPILED)
        yield from _walk(child, prefix if wrapper else f"{prefix}{name}.")


def _optimizer_entries(place: str, optimizer: Any, names: Mapping[int, str], state: TrainingState) -> dict[str, Any]:
    sharded = fsdp1_model(optimizer, state.models)
    by_name = _named_optimizer_state(optimizer, names) if sharded is None else _fsdp1_optimizer_state(optimizer, sharded)
    found: dict[str, Any] = {}
    for index, group in enumerate(by_name["param_groups"]):
        found |= {f"{place}.param_groups.{index}.{key}": as_leaf(value) for key, value in group.items()}
    for name, entries in by_name["state"].items():
        for entry, value in entries.items():
            found |= _items(f"{place}.state.{name}.{entry}", value)
    return found


def _items(key: str, value: Any) -> dict[str, Any]:
    """A list of tensors (LBFGS keeps its history so) as an entry for each, so that they are compared, checked and kept as all tensors are. Its length is an
    entry, too: another rank's list may be longer.
    """
    if isinstance(value, list) and all(item is None or isinstance(item, torch.Tensor) for item in value):
        return {f"{key}[{index}]": as_leaf(item) for index, item in enumerate(value)} | {f"{key}[{_LENGTH}]": len(value)}
    return {key: as_leaf(value)}


def with_lists(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_items`, over the entries of one parameter."""
    whole: dict[str, Any] = {}
    lists: dict[str, dict[str, Any]] = {}
    for entry, value in entries.items():
        name, _, index = entry.removesuffix("]").partition("[")
        if index:
            lists.setdefault(name, {})[index] = value
        else:
            whole[name] = value
    return whole | {name: [items[str(index)] for index in range(items[_LENGTH])] for name, items in lists.items()}


def as_leaf(value: Any) -> Any:
    """The checkpoint library takes mappings, and lists that hold tensors, apart and turns their keys into text; wrapped, they stay whole."""
    nested = isinstance(value, Mapping) or (isinstance(value, list) and not all(isinstance(item, (str, int, float)) for item in value))
    return ({"whole": value},) if nested else value


def from_leaf(value: Any) -> Any:
    """The inverse of `as_leaf`."""
    wrapped = isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].keys() == {"whole"}
    return value[0]["whole"] if wrapped else value


def _named_optimizer_state(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    plain = numbered_state(optimizer)
    by_number = dict(zip(_numbers(plain["param_groups"]), parameters_in_order(optimizer), strict=True))
    groups = [{**group, "params": [names[id(by_number[number])] for number in group["params"]]} for group in plain["param_groups"]]
    return {"param_groups": groups, "state": {names[id(by_number[number])]: entries for number, entries in plain["state"].items()}}


def numbered_state(optimizer: Any) -> dict[str, Any]:
    """`Optimizer.state_dict()`; of one whose state is spread over the ranks the part that lies here, without a collective."""
    if type(optimizer).__name__ != _SPREAD:
        state: dict[str, Any] = optimizer.state_dict()
        return state
    numbers = {id(param): number for number, param in enumerate(parameters_in_order(optimizer))}
    groups = [{**group, "params": [numbers[id(param)] for param in group["params"]]} for group in optimizer.param_groups]
    return {"param_groups": groups, "state": {numbers[id(param)]: entries for param, entries in optimizer.optim.state.items()}}


def params_held(optimizer: Any) -> list[Any]:
    """Those whose state this rank keeps."""
    return parameters_in_order(optimizer.optim if type(optimizer).__name__ == _SPREAD else optimizer)


def _numbers(groups: list[dict[str, Any]]) -> list[int]:
    return [number for group in groups for number in group["params"]]


def fsdp1_model(optimizer: Any, models: tuple[Any, ...]) -> Any | None:
    """The model with FSDP1 units that holds this optimizer's parameters, or None: then its parameters have names of their own."""
    mine = {id(param) for param in parameters_in_order(optimizer)}
    for model in models:
        if FullyShardedDataParallel.fsdp_modules(model) and any(id(param) in mine for param in model.parameters()):
            return model
    return None


@contextmanager
def sharded_fsdp1(model: Any) -> Iterator[None]:
    """FSDP1 hands out and takes shards inside, not full tensors."""
    config, optim_config = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config, optim_config):
        yield


def _fsdp1_optimizer_state(optimizer: Any, model: Any) -> dict[str, Any]:
    with sharded_fsdp1(model):
        named: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return {"param_groups": named.get("param_groups", []), "state": named.get("state", {})}


def _prefixed(place: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{place}.{name}": value for name, value in entries.items()}


def _can_be_written(entry: Any) -> bool:
    try:
        torch.save(entry, io.BytesIO())
    except Exception:  # noqa: BLE001 - whatever pickling a user's object raises
        return False
    return True


def local_tensors(value: Any) -> list[Any]:
    """The tensors that this rank holds of `value`: itself, its shards, or none for anything else."""
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    if hasattr(value, "to_local"):
        return [value.to_local()]
    return [value] if isinstance(value, torch.Tensor) else []


def is_plain_tensor(value: Any) -> bool:
    """True for a tensor that this rank holds whole, as far as torch knows."""
    return isinstance(value, torch.Tensor) and not hasattr(value, "to_local") and not hasattr(value, "local_shards")
