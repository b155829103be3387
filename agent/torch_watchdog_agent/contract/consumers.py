"""Which operators take an index (or another argument with a legal range), and the range they take. A table; knows nothing of batches.

A consumer is looked up by operator before the operator is launched, and returns the uses that it makes of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from torch_watchdog_agent.contract.bounds import BIG

__all__ = ["CONSUMERS", "Kind", "Use", "uses_of"]

Kind: TypeAlias = Literal["range", "some", "ctc", "rows", "groups", "float", "spread", "starts", "count", "agree", "sum", "reach"]
# range   every element within the range
# some    at least one element that is not the ignored value (a mean over none is NaN)
# ctc     labels, input lengths and label lengths fit each other
# rows    a mask that hides no row whole (a softmax over nothing is NaN)
# groups  a mask with as many cells in each row (the rows are laid side by side afterwards)
# float   a floating-point dtype
# spread  more than one value per channel (batch normalisation in training)
# starts  begins with 0 and never decreases (the bags of an EmbeddingBag; nobody else looks, and memory is read past its end)
# count   true cells of a mask: at most `rows`, or exactly `rows` where the option says so
# agree   true cells of a mask: always `rows` so far; the operator itself would take fewer, so that the program decides
# sum     lengths that add up to `rows`
# reach   a slice of a buffer up to `rows`, no further than the buffer goes (torch cuts it short, and what follows seldom fits then)


@dataclass(slots=True, kw_only=True)
class Use:
    """One argument with a legal range. `rows` is one more than the highest legal value, and the length of `table` along `dim` if given."""

    tensors: tuple[torch.Tensor, ...]
    arg: str
    kind: Kind = "range"
    rows: int = 0
    table: torch.Tensor | None = None
    dim: int | None = None
    low: int = 0
    ignored: int | None = None
    wraps: bool = False
    fixed: bool = False  # `rows` belongs to the op, and is no size
    any_device: bool = False  # the op takes an index from another device
    options: Mapping[str, Any] = field(default_factory=dict)


Arguments: TypeAlias = Callable[[str, Any], Any]


def _length(tensor: torch.Tensor, dim: int) -> int:
    return int(tensor.shape[dim]) if tensor.dim() else 1


def _along(table: torch.Tensor, dim: int, index: Any, arg: str = "index", **more: Any) -> list[Use]:
    if not isinstance(index, torch.Tensor):
        return []
    place = dim % table.dim() if table.dim() else None
    return [Use(tensors=(index,), arg=arg, rows=_length(table, dim), table=table, dim=place, **more)]


def _embedding(get: Arguments) -> list[Use]:
    return _along(get("weight", None), 0, get("indices", None), "indices")


def _embedding_bag(get: Arguments) -> list[Use]:
    weight, indices, offsets = get("weight", None), get("indices", None), get("offsets", None)
    places = Use(tensors=(offsets,), arg="offsets", rows=indices.numel() + 1)
    order = Use(tensors=(offsets,), arg="offsets", kind="starts", rows=1, fixed=True)
    return [*_along(weight, 0, indices, "indices"), places, order]


def _masked_scatter(get: Arguments) -> list[Use]:
    """Features laid into the cells of a mask (placeholder tokens): fewer cells than features are legal, though seldom meant."""
    mask, source = get("mask", None), get("source", None)
    parts = {"tensors": (mask,), "arg": "mask", "rows": source.numel()}
    return [Use(**parts, kind="count", options={"exact": False}), Use(**parts, kind="agree")]


def _put(get: Arguments) -> list[Use]:
    """`x[mask] = values`: one row of values for each true cell, or one for all."""
    table, indices, values = get("self", None), get("indices", ()), get("values", None)
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or values.dim() != 1 + table.dim() - mask.dim() or values.shape[0] == 1:
        return _indexing(get)
    return [Use(tensors=(mask,), arg="indices[0]", kind="count", rows=int(values.shape[0]), options={"exact": True})]


def _dim_index(get: Arguments) -> list[Use]:
    return _along(get("self", None), get("dim", 0), get("index", None))


def _indexing(get: Arguments) -> list[Use]:
    table, uses, dim = get("self", None), [], 0
    for index in get("indices", ()):
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            uses += _along(table, dim, index, f"indices[{dim}]", wraps=True, any_device=True)
            dim += 1
    return uses


def _nll(get: Arguments) -> list[Use]:
    scores, target, ignored = get("self", None), get("target", None), get("ignore_index", -100)
    classes = _along(scores, 0 if scores.dim() == 1 else 1, target, "target", ignored=ignored)
    if get("reduction", 1) == 1:
        classes.append(Use(tensors=(target,), arg="target", kind="some", ignored=ignored, fixed=True))
    return classes


def _take(get: Arguments) -> list[Use]:
    table, index = get("self", None), get("index", None)
    return [Use(tensors=(index,), arg="index", rows=table.numel(), wraps=True)]


def _margin(get: Arguments) -> list[Use]:
    return _along(get("self", None), -1, get("target", None), "target")


def _multilabel_margin(get: Arguments) -> list[Use]:
    return _along(get("self", None), -1, get("target", None), "target", low=-1)


def _ctc(get: Arguments) -> list[Use]:
    scores, parts = get("log_probs", None), tuple(get(name, None) for name in ("targets", "input_lengths", "target_lengths"))
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return []
    labels, frames, lengths = parts
    uses = [Use(tensors=(frames,), arg="input_lengths", rows=int(scores.shape[0]) + 1, any_device=True)]
    if labels.dim() == 2:
        uses.append(Use(tensors=(lengths,), arg="target_lengths", rows=int(labels.shape[1]) + 1, any_device=True))
    options = {"endless_is_zero": bool(get("zero_infinity", False))}
    return [*uses, Use(tensors=parts, arg="targets", kind="ctc", rows=int(scores.shape[-1]), options=options)]


def _probability(get: Arguments) -> list[Use]:
    target, given = get("target", None), get("self", None)
    return [
        _floating(target),
        *(Use(tensors=(tensor,), arg=arg, rows=2, fixed=True) for tensor, arg in ((target, "target"), (given, "input"))),
    ]


def _logit_target(get: Arguments) -> list[Use]:
    return [_floating(get("target", None))]


def _floating(target: torch.Tensor) -> Use:
    return Use(tensors=(target,), arg="target", kind="float", fixed=True)


def _not_negative(name: str) -> Callable[[Arguments], list[Use]]:
    def uses(get: Arguments) -> list[Use]:
        return [Use(tensors=(get(name, None),), arg=name, rows=BIG, fixed=True)]

    return uses


def _packed(get: Arguments) -> list[Use]:
    padded, lengths = get("input", None), get("lengths", None)
    return [
        Use(tensors=(lengths,), arg="lengths", low=1, rows=int(padded.shape[1 if get("batch_first", False) else 0]) + 1, any_device=True)
    ]


def _batch_norm(get: Arguments) -> list[Use]:
    values = get("input", None)
    if not get("training", True) or values.dim() != 2:
        return []  # an image has many values per channel
    return [Use(tensors=(), arg="input", kind="spread", rows=int(values.shape[0]))]


_TABLE: dict[Callable[[Arguments], list[Use]], Sequence[str]] = {
    _embedding: ["embedding"],
    _embedding_bag: ["_embedding_bag", "_embedding_bag_forward_only"],
    _dim_index: [
        *("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
        *("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce", "index_reduce_"),
    ],
    _indexing: ["index", "_unsafe_index"],
    _put: ["index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"],
    _masked_scatter: ["masked_scatter", "masked_scatter_"],
    _nll: ["nll_loss_forward", "nll_loss2d_forward"],
    _take: ["take", "put", "put_"],
    _margin: ["multi_margin_loss"],
    _multilabel_margin: ["multilabel_margin_loss_forward"],
    _ctc: ["_ctc_loss", "_cudnn_ctc_loss"],
    _probability: ["binary_cross_entropy"],
    _logit_target: ["binary_cross_entropy_with_logits"],
    _not_negative("self"): ["bincount", "multinomial"],
    _not_negative("repeats"): ["repeat_interleave"],
    _packed: ["_pack_padded_sequence"],
    _batch_norm: ["native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update"],
}


def _by_overload() -> dict[Any, Callable[[Arguments], list[Use]]]:
    found = {}
    for uses, names in _TABLE.items():
        for name in names:
            packet = getattr(torch.ops.aten, name, None)  # not every torch has every one
            for overload in packet.overloads() if packet is not None else ():
                found[getattr(packet, overload)] = uses
    return found


CONSUMERS = _by_overload()


def uses_of(func: Any, position: Mapping[str, int], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Use]:
    """The uses that this call makes of its arguments; none for an operator that is no consumer."""
    consumer = CONSUMERS.get(func)
    if consumer is None:
        return []

    def get(name: str, default: Any) -> Any:
        place = position.get(name)
        if place is not None and place < len(args):
            return args[place]
        return kwargs.get(name, default)

    uses = [use for use in consumer(get) if all(isinstance(tensor, torch.Tensor) for tensor in use.tensors)]
    for use in uses:
        use.tensors = tuple(_own_part(tensor) for tensor in use.tensors)
    return uses


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's part on this rank: its limit is that of the whole table, and looking at the whole index would be a collective."""
    local = None if type(tensor) is torch.Tensor else getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local
