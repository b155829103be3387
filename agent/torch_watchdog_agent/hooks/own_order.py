"""What makes the order of a loader's data besides the global generators: generators of its own, the epoch of its sampler, and accelerate's count of its passes.

`DataLoader(..., shuffle=True, generator=...)` draws each epoch's order from that generator, and accelerate gives each loader that shuffles one. A new process
makes it anew, as it was before the first epoch: the second would come again as the first. Knows no passes and no checkpoints.
"""

from __future__ import annotations

from typing import Any

__all__ = ["count_of", "epoch_of", "generators_of", "keeps_one_iterator", "set_count"]

_GENERATORS = ("generator", "synchronized_generator")
_INSIDE = ("base_dataloader", "sampler", "batch_sampler", "dataset")  # of torch's loaders and samplers, and accelerate's around them
_COUNT = "iteration"  # accelerate's: it seeds samplers and data sets by it


def generators_of(loader: Any) -> tuple[Any, ...]:
    """Each once, in an order that is the same in every process. Attributes are read and nothing of the user's is run."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [loader]
    combined = _attributes(loader).get("_combined_loader")  # Lightning's fetcher
    todo += getattr(combined, "flattened", ()) if combined is not None else ()
    while todo:
        item = todo.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        parts = _attributes(item)
        found |= {id(one): one for name in _GENERATORS if _is_generator(one := parts.get(name))}
        todo += [parts[name] for name in _INSIDE if name in parts]
    return tuple(found.values())


def count_of(loader: Any) -> int | None:
    count = _attributes(loader).get(_COUNT)
    return count if isinstance(count, int) else None


def epoch_of(loader: Any) -> int | None:
    """What its sampler or data set was told last by `set_epoch()`; None where neither takes that, or the loader does it by itself as it begins."""
    if count_of(loader) is not None:
        return None
    parts = _attributes(loader)
    batches = parts.get("batch_sampler")
    for item in (parts.get("sampler"), _attributes(batches).get("sampler"), batches, parts.get("dataset")):
        epoch = _attributes(item).get("epoch")
        if isinstance(epoch, int) and hasattr(item, "set_epoch"):
            return epoch
    return None


def set_count(loader: Any, count: int | None) -> None:
    if count is not None and count_of(loader) is not None:
        setattr(loader, _COUNT, count)


def keeps_one_iterator(loader: Any) -> bool:
    """Whether it has its own way of beginning a pass, and an iterator at hand for that, which it takes for all epochs (timm's MultiEpochsDataLoader, YOLO's
    InfiniteDataLoader). That was made before anybody could tell where to begin."""
    import torch.utils.data.dataloader as module

    home = next((kind for kind in type(loader).__mro__ if "__iter__" in vars(kind)), None)
    kept = (value for name, value in _attributes(loader).items() if name != "_iterator")  # torch's own, for workers that persist
    return (
        home is not module.DataLoader
        and isinstance(loader, module.DataLoader)
        and any(isinstance(one, module._BaseDataLoaderIter) for one in kept)
    )


def _attributes(item: Any) -> dict[str, Any]:
    return getattr(item, "__dict__", {})


def _is_generator(item: Any) -> bool:
    import torch

    return isinstance(item, torch.Generator) and item.device.type == "cpu" and item is not torch.default_generator
