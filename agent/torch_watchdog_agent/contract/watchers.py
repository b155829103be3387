"""Limits that show only in how operators follow each other: a mask before a softmax, rows laid side by side after a selection, lengths of the
batch that went through a list and come back as the sizes of a split.

Owns the patterns; reports them as uses, like a consumer's. Knows nothing of how uses are judged.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_watchdog_agent.contract.bounds import BIG
from torch_watchdog_agent.contract.consumers import Use
from torch_watchdog_agent.contract.tape import Tape

__all__ = ["Watchers"]

_CARRIES = {
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "clone",
    "_to_copy",
    "native_dropout",
    "transpose",
    "unsqueeze",
    "permute",
    "detach",
}
_SPREADS = {"bmm", "mm", "baddbmm", "matmul", "addmm"}


@dataclass(frozen=True, slots=True)
class Note:
    """What we know of a tensor: `hidden` by a mask, `weights` of a softmax over such a tensor, `picked` by a mask."""

    kind: str
    mask: torch.Tensor
    keeps: bool = False
    dim: int = -1


class Watchers:
    """Sees each operator after it ran, and yields uses."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._notes: dict[int, tuple[Any, Note]] = {}

    def seen(self, name: str, args: tuple[Any, ...], out: Any) -> Iterator[tuple[Use, str]]:
        made = out[0] if isinstance(out, (list, tuple)) and out else out
        if name in ("masked_fill", "masked_fill_", "where"):
            self._note_hidden(name, args, made)
        elif name == "index":
            self._note_picked(args, made)
        elif name in ("softmax", "_softmax", "_safe_softmax"):
            self._note_weights(name, args, made)
        elif name in ("view", "_unsafe_view", "reshape"):
            yield from self._laid_out(args, made)
        if name in _CARRIES and args:
            self._carry(args[0], made)
        elif name in _SPREADS:
            yield from self._spread(args)

    def comes(self, name: str, args: tuple[Any, ...]) -> list[Use]:
        """Asked before the operator runs: a split into the very lengths that a tensor of the batch lists, a slice of a buffer."""
        if name == "slice":
            return self._reaches(args)
        if not name.endswith("split_with_sizes") or len(args[1]) < 2:
            return []
        lengths = self._tape.leaf_that_lists(args[1])
        dim = args[2] if len(args) > 2 else 0
        return [] if lengths is None else [Use(tensors=(lengths,), arg="split_sizes", kind="sum", rows=int(args[0].shape[dim]))]

    def _reaches(self, args: tuple[Any, ...]) -> list[Use]:
        table, dim, end = args[0], args[1] if len(args) > 1 else 0, args[3] if len(args) > 3 else None
        if not isinstance(end, int) or not 1 < end < BIG or not self._tape.is_from_outside(table):
            return []
        return [Use(tensors=(), arg="end", kind="reach", rows=end, options={"limit": int(table.shape[dim])})]

    def _put(self, tensor: Any, note: Note) -> None:
        if isinstance(tensor, torch.Tensor):
            self._notes[id(tensor)] = (weakref.ref(tensor), note)

    def _of(self, tensor: Any) -> Note | None:
        known = self._notes.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _pure(self, tensor: torch.Tensor) -> bool:
        value = self._tape.value_of(tensor)
        return value is not None and value.storage.impure is None and bool(value.storage.leaves)

    def _note_hidden(self, name: str, args: tuple[Any, ...], made: Any) -> None:
        if len(args) < 3:
            return
        mask, filled, keeps = (args[0], args[2], True) if name == "where" else (args[1], args[2], False)
        if isinstance(filled, torch.Tensor):
            value = self._tape.value_of(filled)
            constant = self._tape.constants.get(value.number) if value is not None else None
            filled = constant.item() if constant is not None and constant.numel() == 1 else None
        if isinstance(filled, float) and filled == -math.inf and self._pure(mask) and mask.dtype == torch.bool:
            self._put(made, Note("hidden", mask, keeps=keeps))

    def _note_weights(self, name: str, args: tuple[Any, ...], made: Any) -> None:
        note = self._of(args[0])
        if note is None or note.kind != "hidden" or name == "_safe_softmax":
            return
        dim = args[1] % args[0].dim() - args[0].dim()  # from the right, as the mask broadcasts
        if note.mask.dim() >= -dim and note.mask.shape[dim] == args[0].shape[dim]:
            self._put(made, Note("weights", note.mask, keeps=note.keeps, dim=dim))

    def _note_picked(self, args: tuple[Any, ...], made: Any) -> None:
        masks = [index for index in args[1] if index is not None]
        if len(masks) == 1 and masks[0].dtype == torch.bool and masks[0].dim() >= 2 and args[1][0] is masks[0] and self._pure(masks[0]):
            self._put(made, Note("picked", masks[0]))

    def _carry(self, source: Any, made: Any) -> None:
        note = self._of(source)
        if note is not None and note.kind == "weights":
            self._put(made, note)

    def _laid_out(self, args: tuple[Any, ...], made: Any) -> Iterator[tuple[Use, str]]:
        """`x[mask].reshape(batch, -1, width)`: every row of the mask must hold as many."""
        note = self._of(args[0])
        if note is None or note.kind != "picked" or made.dim() < 2:
            return
        rows, picked = note.mask.shape[0], args[0].shape[0]
        if rows > 1 and made.shape[0] == rows and made.shape[0] * made.shape[1] == picked and made.shape[1:] != args[0].shape[1:]:
            yield Use(tensors=(note.mask,), arg="mask", kind="groups", fixed=True, rows=1), "reshape"

    def _spread(self, args: Sequence[Any]) -> Iterator[tuple[Use, str]]:
        """Weights of a softmax that are multiplied as they are: a row of NaN reaches the output."""
        for tensor in args:
            note = self._of(tensor)
            if note is not None and note.kind == "weights":
                options = {"keeps": note.keeps, "dim": note.dim}
                yield Use(tensors=(note.mask,), arg="mask", kind="rows", fixed=True, rows=1, options=options), "softmax"
