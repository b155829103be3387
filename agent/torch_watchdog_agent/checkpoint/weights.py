"""Whether the weights of what is trained lie in a folder that somebody else's code has written: a script may replace how its model is saved, and leave that
to rank 0, or to a later moment.

Reads names and shapes alone: headers of safetensors, and torch's own files without their tensors and without anything that unpickling would run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.errors import CheckpointError

_SAFE, _PICKLED = ".safetensors", (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 2

Shape = tuple[int, ...]
Found = dict[str, set[Shape]]


def refuse_without_weights(folder: Path, models: Iterable[Any], *, but: tuple[str, ...], renamed: bool) -> None:
    """Raises CheckpointError where a parameter that is trained is in no file of `folder`. `but`: how the names of files begin that hold other things.

    `renamed`: some may be saved under other names, or several as one (an adapter's, experts'), so that as many numbers are enough. A file that cannot be
    looked into is taken for what is missing where it is large enough.
    """
    wanted = _trained(models)
    found, unread = _found(folder, but)
    parts = _ends(found)
    missing = [names for names, parameter in wanted if not any(_holds(found, parts, name, tuple(parameter.shape)) for name in names)]
    numbers = sum(math.prod(shape) for shapes in found.values() for shape in shapes)
    if not missing or (renamed and numbers >= sum(parameter.numel() for _, parameter in wanted)):
        return
    if unread >= sum(parameter.numel() * parameter.element_size() for names, parameter in wanted if names in missing):
        return
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    first = ", ".join(names[0] for names in missing[:_SHOWN])
    raise CheckpointError(f"it wrote no weights of {first}{more}: does the script replace how its model is saved?")


def _trained(models: Iterable[Any]) -> list[tuple[tuple[str, ...], Any]]:
    """By all names that each has: of those that are tied a file holds one."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, Any] = {}
    for model in models:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                names.setdefault(id(parameter), []).append(name)
                parameters[id(parameter)] = parameter
    return [(tuple(names[which]), parameter) for which, parameter in parameters.items()]


def _ends(found: Mapping[str, set[Shape]]) -> Found:
    """What is found, by all that its names end in: a wrapper's name may stand before the model's own."""
    ends: Found = {}
    for name, shapes in found.items():
        words = name.split(".")
        for start in range(len(words)):
            ends.setdefault(".".join(words[start:]), set()).update(shapes)
    return ends


def _holds(found: Mapping[str, set[Shape]], ends: Mapping[str, set[Shape]], name: str, shape: Shape) -> bool:
    words = name.split(".")
    inside = (".".join(words[start:]) for start in range(1, len(words)))  # a part of the model may have been saved by itself
    return shape in ends.get(name, ()) or any(shape in found.get(end, ()) for end in inside)


def _found(folder: Path, but: tuple[str, ...]) -> tuple[Found, int]:
    """All tensors by name, and how many bytes are in files that cannot be looked into."""
    found: Found = {}
    unread = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(but)):
        if path.suffix != _SAFE and path.suffix not in _PICKLED:
            continue
        try:
            for name, shape in _in_safetensors(path) if path.suffix == _SAFE else _in_pickled(path):
                found.setdefault(name, set()).add(shape)
        except Exception:  # noqa: BLE001  whatever a reader of another's file raises
            unread += path.stat().st_size
    return found, unread


def _in_safetensors(path: Path) -> list[tuple[str, Shape]]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118  it is no mapping


def _in_pickled(path: Path) -> list[tuple[str, Shape]]:
    import torch

    with suppress(RuntimeError):  # not in the form that a file can be mapped from
        return list(_tensors(torch.load(path, map_location="meta", weights_only=True, mmap=True), ""))
    return list(_tensors(torch.load(path, map_location="meta", weights_only=True), ""))


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Shape]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif hasattr(value, "data_ptr"):
        yield name, tuple(value.shape)
