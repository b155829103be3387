"""An exception about a dtype, a shape or a NumPy array: which tensor of the batch it speaks of, read off the frames that raised.

Owns the reading of those frames, and the words. Works after the training has failed by itself, so that a guess could not do harm; still it names a
tensor only where the frame holds it, or where two tensors of the batch contradict each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from traceback import walk_tb
from types import TracebackType
from typing import Any

import numpy as np
import torch

from torch_watchdog_agent.contract.fits import Unfit
from torch_watchdog_agent.contract.flatten import arrays_of
from torch_watchdog_agent.contract.forms import said
from torch_watchdog_agent.contract.frames import is_users
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_agent.errors import text_of
from torch_watchdog_proto.messages import BatchFact, BoundFact, Violation
from torch_watchdog_proto.names import spoken

__all__ = ["another_form", "mask_unlike", "misfit"]

_FUNCTIONAL = f"torch{os.sep}nn{os.sep}functional.py"
_OURS = (TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError)
_OF_FORM = (TypeError, AttributeError, ValueError)
_ABOUT_NOTHING = re.compile(r"NoneType|required (positional|keyword)")
_INDICES = {"embedding": "int64 or int32", "embedding_bag": "int64 or int32", "cross_entropy": "int64", "nll_loss": "int64"}
_ABOUT_DTYPE = re.compile(
    r"scalar types?|dtype|input type|can't be cast|only applicable to index tensor|tensors used as indices", re.IGNORECASE
)
_ABOUT_SHAPE = re.compile(
    r"batch_size|target size|target tensor expected|must match|shape|size of tensor|different to the input size|same size|"
    r"not match|inconsistent|expected input|expanded size|sizes? of|broadcast|out of bounds for dimension|invalid for input|"
    r"number of indices|size mismatch|but got|cannot be multiplied",
    re.IGNORECASE,
)


MAX_TOLD = 8  # samples
_MAKE = {
    "tensor": "torch.as_tensor(array) in the collator, or leave collation to torch's default_collate, which does that.",
    "array": "Return the same for every sample: tensor.numpy() in the data set, or let the loop make tensors by torch.as_tensor, which takes both.",
    "list": "Return the same for every sample: tensor.tolist() in the data set, or let the loop make tensors by torch.as_tensor, which takes both.",
}


@dataclass(frozen=True, slots=True)
class _Call:
    """The innermost function of torch.nn.functional that raised, with what it was given, and the line outside of torch that led to it."""

    op: str
    given: Mapping[str, Any]
    source: str


def misfit(error: BaseException, origin: Origin, batch: object) -> Violation | None:
    """What is wrong with the batch behind this exception, where that can be read off it. `batch`: as the loop got it."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, _OURS):
        return None
    call, text = _call_that_raised(error.__traceback__), text_of(error)
    if origin.reformed and (isinstance(error, _OF_FORM) or _ABOUT_DTYPE.search(text) or _ABOUT_SHAPE.search(text)):
        return another_form(next(iter(origin.reformed)), origin, call.op, call.source)
    lacking = _lacking(call, error, origin)
    if lacking is not None:
        return lacking
    arrays = arrays_of(batch)
    if "numpy.ndarray" in text:
        return _not_a_tensor(call, _among(arrays, call.given.values()) or arrays)
    held = _among(arrays, _where_it_raised(error.__traceback__)) if arrays and isinstance(error, _OF_FORM) else {}
    if held:
        return _not_a_tensor(call, held)
    about_dtype = _ABOUT_DTYPE.search(text) is not None
    if about_dtype:
        return _of_another_dtype(call, origin) or _retyped(call, origin)
    if _ABOUT_SHAPE.search(text) is None:
        return None
    return _of_another_shape(call, origin) or _mask_of_another_length(call, origin) or _unfit(call, origin)


def _call_that_raised(traceback: TracebackType | None) -> _Call:
    call, source = None, "?"
    for frame, line in walk_tb(traceback):
        name = frame.f_code.co_filename
        if name.endswith(_FUNCTIONAL):
            call = _Call(frame.f_code.co_name, frame.f_locals, source)
        elif is_users(name):
            source = f"{name}:{line}"
    return _Call("", {}, source) if call is None else call


def _lacking(call: _Call, error: BaseException, origin: Origin) -> Violation | None:
    """A tensor that every batch had and this one has not, where the step fails for want of it."""
    text = text_of(error)
    wanted = [key for key in origin.lacks if key.rpartition(".")[2] in text]
    keys = wanted or (origin.lacks if _ABOUT_NOTHING.search(text) else ())
    if not keys:
        return None
    return _violation(
        "batch.shape", keys[0], origin, call, summary=f"{keys[0]} is not in this batch; every batch before had it",
        cause=f"The data set or the collator left {', '.join(keys)} out (an optional field, another split, a filter), and the step needs it.",
        fix="Let the collator return the same tensors for every batch, filled where a sample has none.",
    )  # fmt: skip


def _of_another_dtype(call: _Call, origin: Origin) -> Violation | None:
    """A loss's target, or the index of a lookup."""
    given = call.given.get("input")
    suspect = call.given.get("target", given)
    key = _key_of(suspect, origin) if isinstance(suspect, torch.Tensor) else None
    if key is None:
        return None
    wrong, output = _name(suspect.dtype), _name(given.dtype) if isinstance(given, torch.Tensor) else "another dtype"
    needed = _INDICES.get(call.op, output)
    return _violation(
        "batch.dtype", key, origin, call, summary=f"{spoken(key)} has dtype {wrong}; {call.op} needs {needed}",
        cause=f"{spoken(key)} came as {wrong}, and {call.op} takes {needed}. The values may be fine: only the dtype is wrong.",
        fix=f"Cast {spoken(key)} in the data set or the collator: {_cast(needed)}.",
    )  # fmt: skip


def _retyped(call: _Call, origin: Origin) -> Violation | None:
    """No frame holds the tensor any more, but one of the batch has another dtype than it always had."""
    for key, usual in (origin.retyped or {}).items():
        wrong, name = _name(origin.leaves[key].dtype), spoken(key)
        return _violation(
            "batch.dtype", key, origin, call, summary=f"{name} has dtype {wrong}; it always was {usual}",
            cause=f"{name} came as {wrong} and always was {usual} before, and the step fails about a dtype. The values may be fine: only the dtype is wrong.",
            fix=f"Cast {name} in the data set or the collator: {_cast(usual)}.",
        )  # fmt: skip
    return None


def _unfit(call: _Call, origin: Origin) -> Violation | None:
    """No frame holds the tensor any more, but one of the batch has not the length that it always had, or had in common with another."""
    unfit = origin.unfit
    if unfit is None:
        return None
    if unfit.usual is not None:
        return _of_another_length(call, unfit, unfit.usual, origin)
    one, other = spoken(unfit.key), spoken(unfit.other)
    mine, theirs = tuple(origin.leaves[unfit.key].shape), tuple(origin.leaves[unfit.other].shape)
    return _violation(
        "batch.shape", unfit.key, origin, call, summary=f"{one} {mine} does not fit {other} {theirs}",
        cause=f"Dimension {unfit.dim} of {one} always was as long as dimension {unfit.other_dim} of {other}; now they are {mine} and {theirs}.",
        fix="Truncate, pad and filter all tensors of a sample together, in the data set or the collator.",
    )  # fmt: skip


def _of_another_length(call: _Call, unfit: Unfit, usual: int, origin: Origin) -> Violation:
    taken = tuple(origin.leaves[unfit.key].shape)
    return _violation(
        "batch.shape", unfit.key, origin, call, summary=f"{spoken(unfit.key)} has shape {taken}; dimension {unfit.dim} of it always was {usual}",
        cause=f"Dimension {unfit.dim} of {spoken(unfit.key)} was {usual} in every batch before; now its shape is {taken}, and the step fails about a shape.",
        fix=f"Give {spoken(unfit.key)} {usual} there, as all other samples have (channels, features, fields), or leave the sample out.",
    )  # fmt: skip


def _of_another_shape(call: _Call, origin: Origin) -> Violation | None:
    """A loss's target that does not fit what the model has made."""
    given, target = call.given.get("input"), call.given.get("target")
    if not isinstance(given, torch.Tensor) or not isinstance(target, torch.Tensor) or given.shape == target.shape:
        return None
    key = _key_of(target, origin)
    if key is None:
        return None
    taken, output = tuple(target.shape), tuple(given.shape)
    wanted = (output[0], *output[2:]) if call.op in ("cross_entropy", "nll_loss") and len(output) > 1 else output
    return _violation(
        "batch.shape", key, origin, call, summary=f"{spoken(key)} has shape {taken}; {call.op} of an output {output} needs {wanted}",
        cause=f"The model's output is {output}, for which {call.op} takes a target of shape {wanted}; {spoken(key)} gives {taken}.",
        fix=f"Give {spoken(key)} that shape where it is made (a row that is missing, a dimension of 1 too many or too few), or reduce the output to it.",
    )  # fmt: skip


def _key_of(tensor: torch.Tensor, origin: Origin) -> str | None:
    """The tensor of the batch that this one is, or is a view of; else the only one of its shape and dtype (a copy on another device)."""
    leaves = {**origin.leaves, **origin.own}
    for key, leaf in leaves.items():
        if leaf is tensor or (leaf.device == tensor.device and leaf.numel() and leaf.untyped_storage().data_ptr() == _place(tensor)):
            return key
    alike = [key for key, leaf in leaves.items() if leaf.shape == tensor.shape and leaf.dtype == tensor.dtype]
    if len(alike) == 1:
        return alike[0]
    return next((key for key, leaf in leaves.items() if _laid_out_anew(leaf, tensor)), None)


def _laid_out_anew(leaf: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether they hold the same numbers in the same order (a slice that was flattened); a device is not waited for."""
    same = leaf.is_cpu and tensor.is_cpu and leaf.dtype == tensor.dtype and leaf.numel() == tensor.numel()
    return same and bool(torch.equal(leaf.reshape(-1), tensor.reshape(-1)))


def _place(tensor: torch.Tensor) -> int:
    return 0 if tensor.device.type == "meta" else int(tensor.untyped_storage().data_ptr())


def _where_it_raised(traceback: TracebackType | None) -> list[Any]:
    """`ids.size()` of an array says only that an int cannot be called: what the innermost frame holds."""
    frames = [frame for frame, _ in walk_tb(traceback)]
    return list(frames[-1].f_locals.values()) if frames else []


def _among(arrays: Mapping[str, Any], given: Iterable[Any]) -> dict[str, Any]:
    """The batch's arrays among these values."""
    held = [value for value in given if isinstance(value, np.ndarray)]
    return {key: array for key, array in arrays.items() if any(np.may_share_memory(array, one) for one in held)}


def _not_a_tensor(call: _Call, arrays: Mapping[str, Any]) -> Violation | None:
    keys = list(arrays)
    if not keys:
        return None
    array = arrays[keys[0]]
    what = keys[0] if len(keys) == 1 else f"{', '.join(keys)}"
    fact = BatchFact(key=keys[0], shape=tuple(array.shape), dtype=f"numpy.ndarray of {array.dtype}")
    return Violation(
        kind="batch.dtype", summary=f"{what} came as a NumPy array; {call.op or 'the model'} needs a tensor",
        cause=f"The data set or the collator returns {what} as a NumPy array ({array.dtype}), and nothing makes a tensor of it before the model.",
        fix=_MAKE["tensor"], batch=fact, bound=BoundFact(op=call.op, source=call.source), repairable=False,
    )  # fmt: skip


def another_form(key: str, origin: Origin, op: str = "", source: str | None = None, *, repairable: bool = False) -> Violation:
    """A NumPy array or a list where every batch had a tensor, or the other way round."""
    form, usual, tensor, what = origin.forms.get(key, "tensor"), (origin.reformed or {})[key], origin.leaves[key], spoken(key)
    dtype, wanted = _name(tensor.dtype), f"{op} needs a tensor" if op and usual == "tensor" else f"it always was {said(usual)}"
    rows = [index for index in origin.indices or () if index is not None]
    samples = (
        f" It holds the dataset samples {', '.join(map(str, rows[:MAX_TOLD]))}{', ...' if len(rows) > MAX_TOLD else ''}." if rows else ""
    )
    return Violation(
        kind="batch.dtype", summary=f"{what} came as {said(form)}; {wanted}",
        cause=f"The data set or the collator returned {what} as {said(form)} ({dtype}) in this batch; it was {said(usual)} in every batch before.{samples}",
        fix=_MAKE[usual], repairable=repairable,
        batch=BatchFact(
            key=key, shape=tuple(tensor.shape), device=str(origin.device(key)), sample=origin.sample(key, None),
            dtype={"array": f"numpy.ndarray of {dtype}", "list": f"list of {dtype}"}.get(form, dtype),
        ),
        bound=BoundFact(op=op, source=source, learned_from=f"always {said(usual)} so far"),
    )  # fmt: skip


def _mask_of_another_length(call: _Call, origin: Origin) -> Violation | None:
    for key, mask in origin.leaves.items():
        ids = origin.leaves.get(key.removesuffix("attention_mask") + "input_ids") if key.endswith("attention_mask") else None
        if ids is None or ids.dim() < 2 or mask.dim() != 2 or mask.shape == ids.shape[:2]:
            continue
        return _unlike(key, key.removesuffix("attention_mask") + "input_ids", origin, call)
    return None


def mask_unlike(mask: str, ids: str, origin: Origin) -> Violation:
    """A mask that the model will take though it does not fit the ids: a warning."""
    found = _unlike(mask, ids, origin, _Call("", {}, "?"))
    more = " So far both had the same shape. Where the library fills or cuts the mask, the step runs, and attends to the wrong positions."
    return replace(found, cause=found.cause + more, severity="warning", bound=BoundFact(op="", learned_from=f"the shape of {ids} so far"))


def _unlike(mask: str, ids: str, origin: Origin, call: _Call) -> Violation:
    taken, wanted = tuple(origin.leaves[mask].shape), tuple(origin.leaves[ids].shape)
    return _violation(
        "batch.shape", mask, origin, call, summary=f"{mask} {taken} does not fit {ids} {wanted}",
        cause=f"{mask} has shape {taken}, and {ids} {wanted}: the mask was made for another length (before truncation or padding).",
        fix="Truncate and pad both by the same call of the tokenizer or processor.",
    )  # fmt: skip


def _violation(kind: str, key: str, origin: Origin, call: _Call, *, summary: str, cause: str, fix: str) -> Violation:
    tensor = origin.leaves.get(key, origin.own.get(key))
    shape, dtype = (tuple(tensor.shape), _name(tensor.dtype)) if tensor is not None else ((), "")
    fact = BatchFact(key=key, shape=shape, dtype=dtype, device=str(origin.device(key)) if key in origin.leaves else "cpu")
    bound = BoundFact(op=call.op or "forward", source=call.source)
    return Violation(kind=kind, summary=summary, cause=cause, fix=fix, batch=fact, bound=bound, repairable=False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(needed: str) -> str:
    return ".long()" if needed.startswith("int64") else ".float()" if needed.startswith("float") else f".to(torch.{needed})"
