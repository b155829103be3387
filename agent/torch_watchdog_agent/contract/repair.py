"""A legal stand-in for a bad batch: the same keys and dtypes, offending elements made legal or a length cut, checked again by the caller's checks.

Its gradients are thrown away; it only keeps the collectives of the step whole. None where nothing of this repairs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from torch_watchdog_agent.contract.findings import Oddity, Seen
from torch_watchdog_agent.contract.fits import Fits
from torch_watchdog_agent.contract.origin import element_ids
from torch_watchdog_agent.contract.plan import Finding
from torch_watchdog_agent.contract.replay import Resolve
from torch_watchdog_agent.contract.rules import Rule

__all__ = ["Recheck", "cut_lengths", "legal_stand_in"]

ROUNDS = 8
_NO_CELLS = (torch.uint16, torch.uint32, torch.uint64)  # of these torch cannot write single ones
Leaves: TypeAlias = Mapping[str, torch.Tensor]
Recheck: TypeAlias = Callable[[Leaves], tuple[Sequence[Finding], Sequence[Rule]]]


def legal_stand_in(
    leaves: Leaves, oddities: Sequence[Oddity], seen: Seen, recheck: Recheck, resolve: Resolve
) -> dict[str, torch.Tensor] | None:
    """The tensors to put in place of the batch's own, or None."""
    for start in _whole_then_shorter(_without_oddities(leaves, oddities, seen), seen.fits):
        for mend in (_mended_cells, _mended_samples):
            candidate = dict(start)
            for _ in range(ROUNDS):
                findings, failed = recheck(candidate)
                if failed and not findings:
                    break
                if not findings:
                    return {key: tensor for key, tensor in candidate.items() if tensor is not leaves[key]}
                changed = mend(candidate, findings, resolve)
                if not changed:
                    break
                candidate.update(changed)
    return None


def _whole_then_shorter(leaves: dict[str, torch.Tensor], fits: Fits) -> Iterator[dict[str, torch.Tensor]]:
    """No value makes a sequence fit that is longer than its positions: what has its length, in a dimension that is neither the batch's nor always was as long,
    is cut to half of it, or less."""
    yield leaves
    dims_of: dict[int, list[tuple[str, int]]] = {}
    for key, tensor in leaves.items():
        for dim, size in enumerate(tensor.shape[1:], 1):
            if not fits.always_was(key, dim, size):
                dims_of.setdefault(size, []).append((key, dim))
    for size in sorted(dims_of, reverse=True):
        length = size
        while length > 1:
            length //= 2
            cut = dict(leaves)
            for key, dim in dims_of[size]:
                cut[key] = cut[key].narrow(dim, 0, length)
            yield {key: tensor if tensor is leaves[key] else tensor.clone() for key, tensor in cut.items()}


def cut_lengths(leaves: Leaves, legal: Leaves) -> dict[int, int]:
    """Which lengths a stand-in has others in the place of."""
    pairs = [(leaves[key].shape, tensor.shape) for key, tensor in legal.items()]
    return {before: after for old, new in pairs for before, after in zip(old, new, strict=False) if before != after}


def _without_oddities(leaves: Leaves, oddities: Sequence[Oddity], seen: Seen) -> dict[str, torch.Tensor]:
    whole = dict(leaves)
    for odd in oddities:
        tensor = whole[odd.key]
        if odd.kind == "batch.not_finite":
            whole[odd.key] = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
        elif odd.kind == "batch.dtype":
            whole[odd.key] = tensor.to(seen.dtype_of(odd.key) or tensor.dtype)
        elif odd.kind == "batch.form":
            whole[odd.key] = tensor.clone()  # it has to take the place of what is none
        elif odd.kind == "batch.device":
            whole[odd.key] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=seen.device_of(odd.key) or "cpu")
    return whole


def _mended_cells(leaves: Leaves, findings: Sequence[Finding], resolve: Resolve) -> dict[str, torch.Tensor]:
    """Every offending cell set to a value that its consumer takes."""
    changed: dict[str, torch.Tensor] = {}
    for finding in findings:
        recipe = finding.rule.recipe
        for key in dict.fromkeys(recipe.leaves.values()):
            ids = element_ids(recipe, leaves, key, resolve)
            if ids.shape != finding.mask.shape:
                continue
            hits = ids[finding.mask & (ids >= 0)].unique()
            if finding.rule.kind == "some":
                hits = hits[:1]
            if hits.numel():
                tensor = changed.get(key, leaves[key]).clone()
                if finding.rule.kind == "starts":
                    tensor[0] = 0
                    tensor = tensor.cummax(0).values
                else:
                    tensor = _with_cells(tensor, hits, _legal(finding))
                changed[key] = tensor
    return changed


def _with_cells(tensor: torch.Tensor, cells: torch.Tensor, value: int) -> torch.Tensor:
    wide = tensor.to(torch.int64) if tensor.dtype in _NO_CELLS else tensor
    wide.reshape(-1)[cells] = value
    return wide.to(tensor.dtype)


def _legal(finding: Finding) -> int:
    """Rather an ordinary value of the same batch than padding or what a loss leaves out: a program that counts those must count the same."""
    if finding.rule.kind != "range":
        return 0
    low, ignored = max(0, int(finding.allowed.low)), finding.allowed.ignored
    if finding.rule.recipe.is_direct and finding.values[0].shape == finding.mask.shape:
        others = finding.values[0][~finding.mask]
        if ignored is not None:
            others = others[others != ignored]
        if others.numel():
            return int(others.max())
    return low if ignored is None else ignored


def _mended_samples(leaves: Leaves, findings: Sequence[Finding], resolve: Resolve) -> dict[str, torch.Tensor]:
    """Every offending sample replaced by a sample of the same batch that does not offend."""
    bad: set[int] = set()
    count = 0
    for finding in findings:
        recipe = finding.rule.recipe
        for key in dict.fromkeys(recipe.leaves.values()):
            ids = element_ids(recipe, leaves, key, resolve)
            tensor = leaves[key]
            if ids.shape != finding.mask.shape or tensor.dim() == 0 or tensor.shape[0] == 0:
                continue
            hits = ids[finding.mask & (ids >= 0)]
            bad.update((hits // max(1, tensor[0].numel())).tolist())
            count = tensor.shape[0]
    good = next((row for row in range(count) if row not in bad), None)
    if good is None or not bad:
        return {}
    return {key: _with_rows(tensor, bad, good) for key, tensor in leaves.items() if tensor.dim() and tensor.shape[0] == count}


def _with_rows(tensor: torch.Tensor, rows: set[int], good: int) -> torch.Tensor:
    copied = tensor.clone()
    for row in rows:
        copied[row] = tensor[good]
    return copied
