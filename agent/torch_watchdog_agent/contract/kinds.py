"""What it means to offend, for each kind of use. Pure functions of tensors, on whatever device they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from torch_watchdog_agent.contract.bounds import Range
from torch_watchdog_agent.contract.consumers import Kind

__all__ = ["copies", "counted", "ctc_frames_needed", "ctc_labels_read", "offending", "outside"]


def outside(values: torch.Tensor, allowed: Range) -> torch.Tensor:
    """Where the values are not allowed."""
    bad = (values < allowed.low) | (values > allowed.high)
    if values.is_floating_point():
        bad |= values.isnan()
    return bad if allowed.ignored is None else bad & (values != allowed.ignored)


def offending(kind: Kind, values: Sequence[torch.Tensor], allowed: Range, options: Mapping[str, Any]) -> torch.Tensor | None:
    """A mask over the first of `values`, or None where nothing offends. Where the whole tensor is meant, the mask has one element."""
    if kind == "spread":
        return torch.ones(1, dtype=torch.bool, device="cpu") if allowed.high < 1 else None
    if kind == "reach":
        return torch.ones(1, dtype=torch.bool, device="cpu") if allowed.high >= options["limit"] else None
    if kind == "float":
        return None if values[0].is_floating_point() else torch.ones(1, dtype=torch.bool, device="cpu")
    if kind == "some":
        supervised = values[0].numel() and bool((values[0] != allowed.ignored).any())
        return None if supervised else torch.ones_like(values[0], dtype=torch.bool, device="cpu")
    if kind in ("count", "agree", "sum"):
        return (
            None
            if _adds_up(kind, counted(kind, values[0]), int(allowed.high) + 1, options)
            else torch.ones(1, dtype=torch.bool, device="cpu")
        )
    if values[0].numel() == 0:
        return None
    bad = _mask(kind, values, allowed, options)
    return bad if bool(bad.any()) else None


def _mask(kind: Kind, values: Sequence[torch.Tensor], allowed: Range, options: Mapping[str, Any]) -> torch.Tensor:
    if kind == "rows":
        hidden = ~values[0].bool() if options["keeps"] else values[0].bool()
        return hidden.all(options["dim"], keepdim=True).expand(hidden.shape)
    if kind == "starts":
        return _starts(values[0])
    if kind == "groups":
        return _unequal(values[0])
    if kind == "ctc":
        return _ctc_misfits(values, allowed, options)
    return outside(values[0], allowed)


def counted(kind: Kind, values: torch.Tensor) -> int:
    """The sum of lengths, or the true cells of a mask. A mask is mostly expanded over the features: one of the copies is counted."""
    if kind == "sum":
        return int(values.sum())
    whole = int(values.numel())
    for dim, stride in enumerate(values.stride()):
        if stride == 0:
            values = values.narrow(dim, 0, min(1, values.shape[dim]))
    return int(torch.count_nonzero(values)) * (whole // max(1, int(values.numel())))


def copies(mask: torch.Tensor) -> int:
    """How often each cell of an expanded mask is there."""
    return prod([int(length) for length, stride in zip(mask.shape, mask.stride(), strict=True) if stride == 0])


def _adds_up(kind: Kind, found: int, expected: int, options: Mapping[str, Any]) -> bool:
    if kind == "count":
        return found == expected or expected == 1 if options["exact"] else found <= expected
    return found == expected


def _starts(offsets: torch.Tensor) -> torch.Tensor:
    bad = torch.zeros_like(offsets, dtype=torch.bool)
    if offsets.dim() == 1:
        bad[0] = offsets[0] != 0
        bad[1:] = offsets[1:] < offsets[:-1]
    return bad


def _unequal(mask: torch.Tensor) -> torch.Tensor:
    """Rows whose count is not the commonest, where the total cannot be laid out in rows."""
    counts = mask.flatten(1).sum(1)
    if int(counts.sum()) % len(counts) == 0:
        return torch.zeros_like(mask)
    odd = counts != counts.mode().values
    return odd.reshape(-1, *[1] * (mask.dim() - 1)).expand(mask.shape)


def ctc_frames_needed(labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Frames that each row of `labels` [N, S] needs: its length, and a blank between equal neighbours."""
    place = torch.arange(1, labels.shape[1], device=labels.device)
    repeats = (labels[:, 1:] == labels[:, :-1]) & (place[None] < lengths[:, None])
    return lengths + repeats.sum(1)


def ctc_labels_read(labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`labels` [N, S] with a legal 0 where the loss does not look."""
    place = torch.arange(labels.shape[1], device=labels.device)
    return torch.where(place[None] < lengths[:, None], labels, 0)


def _ctc_misfits(values: Sequence[torch.Tensor], allowed: Range, options: Mapping[str, Any]) -> torch.Tensor:
    """Cells of `targets` [N, S] that are no class, and whole rows that do not fit their frames. Flat targets: only the classes."""
    labels, frames, lengths = (part.to("cpu", torch.int64) for part in values)
    if labels.dim() != 2:
        return outside(labels, allowed)
    read = torch.arange(labels.shape[1], device="cpu")[None] < lengths[:, None]
    bad = outside(labels, allowed) & read
    if not options["endless_is_zero"]:
        bad |= (ctc_frames_needed(labels, lengths) > frames)[:, None]
    return bad
