"""The norm of the gradients that an update is about to be made of, where that was asked for and the loop does not compute it.

Owns the arithmetic; reads gradients, changes none, waits for no device and calls no collective. What a rank holds of a sharded gradient is its shard, and
so is the norm. Sparse gradients are left out: a norm of theirs has to be gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["Norm", "norm_of"]


class Norm:
    """`value`: a tensor of one element, where the gradients are. `is_of_shard`: other ranks hold the rest of them."""

    __slots__ = ("is_of_shard", "value")

    def __init__(self, value: Any, *, is_of_shard: bool) -> None:
        self.value, self.is_of_shard = value, is_of_shard


def norm_of(optimizer: Any) -> Norm | None:
    """Of the gradients of this optimizer's parameters, in float32; None where it has none."""
    import torch

    held = list(_gradients(optimizer))
    if not held:
        return None
    with torch.no_grad():
        first = held[0][0].device
        norms = torch._foreach_norm([gradient for gradient, _ in held], 2.0, dtype=torch.float32)
        total = torch.linalg.vector_norm(torch.stack([norm.to(first, non_blocking=True) for norm in norms]))
        scale = getattr(optimizer, "grad_scale", None)  # an optimizer that unscales by itself is stepped with this
        return Norm(total if scale is None else total / scale.to(first), is_of_shard=any(is_shard for _, is_shard in held))


def _gradients(optimizer: Any) -> Iterator[tuple[Any, bool]]:
    """What this rank holds of each, and whether that is a shard."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                continue
            if hasattr(gradient, "to_local"):
                spread = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                yield gradient.to_local(), any(size > 1 and not place.is_replicate() for size, place in spread)
            else:
                yield gradient, _is_of_fsdp1(parameter)


def _is_of_fsdp1(parameter: Any) -> bool:
    return bool(getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False))
