"""What needs no trace to see: not finite, another dtype, another device, far larger than ever. Owns what was seen of each tensor so far.

Learns from every batch that trained, no sooner than its step has run where it might be bad, and speaks only where the traces say that the tensor reaches
the model as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from torch_watchdog_agent.contract.check import Extremes
from torch_watchdog_agent.contract.fits import Fits
from torch_watchdog_agent.contract.forms import Form

__all__ = ["Oddity", "Past", "Seen"]

OUTLIER_AFTER_BATCHES = 10
FORM_AFTER_BATCHES = 4
OUTLIER_FROM_ELEMENTS = 4096
MAX_WAITING = 64
Forms: TypeAlias = Mapping[str, Form]  # of those tensors that the loop has as something else
_News: TypeAlias = tuple[Sequence[str], Mapping[str, torch.Tensor], Mapping[str, Extremes], Forms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddity:
    """One tensor that is not as it always was. `usual` is what was seen before."""

    kind: str
    key: str
    usual: str = ""
    form: Form = "tensor"  # as it always was
    largest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What the batches before held of one integer tensor: how many they were, and the extremes of all of them."""

    batches: int
    low: int
    high: int


@dataclass(slots=True)
class _Known:
    dtypes: set[torch.dtype] = field(default_factory=set)
    devices: set[torch.device] = field(default_factory=set)
    forms: set[Form] = field(default_factory=set)
    largest: int = 0
    not_finite: bool = False
    low: int | None = None  # of integers
    high: int = 0

    def holds(self, seen: Extremes) -> bool:
        """Whether these integers lie between the extremes so far."""
        return type(seen.low) is not int or (self.low is not None and self.low <= seen.low and seen.high <= self.high)


@dataclass(slots=True)
class Seen:
    """What each tensor of the batch was like so far. `outlier_times`: as large as the largest so far, and a tensor is told.

    `lists`: paths of lists that count as tensors because the program makes such of them.
    """

    outlier_times: float = 10.0
    batches: int = 0
    lists: set[str] = field(default_factory=set)
    _known: dict[str, _Known] = field(default_factory=dict)
    fits: Fits = field(default_factory=Fits)
    waiting: dict[int, _News] = field(default_factory=dict)  # by batch: what is taken once its step has run
    _in_step: list[int] = field(default_factory=list)

    def __contains__(self, path: object) -> bool:
        """Whether a list at this path counts as a tensor."""
        return path in self.lists or path in self._known

    def news(self, leaves: Mapping[str, torch.Tensor], seen: Mapping[str, Extremes], forms: Forms) -> list[str]:
        """The tensors that are not as they were before in every respect; most batches have none."""
        return [key for key, tensor in leaves.items() if not self._is_familiar(key, tensor, seen[key], forms)]

    def _is_familiar(self, key: str, tensor: torch.Tensor, seen: Extremes, forms: Forms) -> bool:
        known = self._known.get(key)
        if (
            known is None
            or forms.get(key, "tensor") not in known.forms
            or tensor.dtype not in known.dtypes
            or tensor.device not in known.devices
        ):
            return False
        return tensor.numel() <= known.largest and known.holds(seen) and (seen.finite or known.not_finite)

    def oddities(self, news: Sequence[str], leaves: Mapping[str, torch.Tensor], seen: Mapping[str, Extremes], forms: Forms) -> list[Oddity]:
        """What is odd about these tensors; nothing about one that was never seen."""
        found = []
        for key in news:
            known = self._known.get(key)
            if known is not None:
                found += self._of_another_form(key, forms.get(key, "tensor"), known)
                found += _odd(key, leaves[key], seen[key], known) + self._far_larger(key, leaves[key], known)
        unfit = self.fits.unfit(leaves)
        if unfit is not None and unfit.is_of_a_mask:
            found.append(Oddity(kind="batch.shape", key=unfit.key, usual=unfit.other))
        return found

    def _of_another_form(self, key: str, form: Form, known: _Known) -> list[Oddity]:
        """Once a few batches have trained: until then nobody can say what is usual."""
        if form in known.forms or len(known.forms) > 1 or self.batches < FORM_AFTER_BATCHES:
            return []
        return [Oddity(kind="batch.form", key=key, form=next(iter(known.forms)))]

    def _far_larger(self, key: str, tensor: torch.Tensor, known: _Known) -> list[Oddity]:
        size = tensor.numel()
        if self.batches >= OUTLIER_AFTER_BATCHES and size >= OUTLIER_FROM_ELEMENTS and size >= self.outlier_times * known.largest > 0:
            return [Oddity(kind="batch.size_outlier", key=key, largest=known.largest)]
        return []

    def past_of(self, key: str) -> Past | None:
        """None where nothing was seen of it, or no integers."""
        known = self._known.get(key)
        return None if known is None or known.low is None else Past(batches=self.batches, low=known.low, high=known.high)

    def expects_not_finite(self, key: str) -> bool:
        """Whether this tensor held NaN or infinity before and the training went on."""
        known = self._known.get(key)
        return known is not None and known.not_finite

    def dtype_of(self, key: str) -> torch.dtype | None:
        """The one dtype that this tensor always had."""
        known = self._known.get(key)
        return next(iter(known.dtypes)) if known is not None and len(known.dtypes) == 1 else None

    def device_of(self, key: str) -> str | None:
        known = self._known.get(key)
        return str(next(iter(known.devices))) if known is not None and len(known.devices) == 1 else None

    def took(self, news: Sequence[str], leaves: Mapping[str, torch.Tensor], seen: Mapping[str, Extremes], forms: Forms) -> None:
        """This batch went to the training: what was new about it is new no more."""
        self.batches += 1
        self.fits.took(leaves)
        for key in news:
            known, tensor = self._known.setdefault(key, _Known()), leaves[key]
            known.dtypes.add(tensor.dtype)
            known.devices.add(tensor.device)
            known.forms.add(forms.get(key, "tensor"))
            known.largest = max(known.largest, tensor.numel())
            known.not_finite |= not seen[key].finite
            if type(seen[key].low) is int:
                known.high = seen[key].high if known.low is None else max(known.high, seen[key].high)
                known.low = seen[key].low if known.low is None else min(known.low, seen[key].low)

    def wait(self, batch: int, news: Sequence[str], leaves: Mapping[str, torch.Tensor], seen: Mapping[str, Extremes], forms: Forms) -> None:
        """Nobody can vouch for this batch before its step has run."""
        if len(self.waiting) >= MAX_WAITING:
            self.waiting.pop(next(iter(self.waiting)))
        self.waiting[batch] = (news, leaves, seen, forms)

    def handed_over(self, batch: int) -> None:
        """The step at hand uses this batch."""
        if batch in self.waiting:
            self._in_step.append(batch)

    def step_ended(self) -> None:
        """The batches of the step at hand have trained."""
        for batch in self._in_step:
            if batch in self.waiting:
                self.took(*self.waiting.pop(batch))
        self._in_step.clear()

    def took_usual(self, extremes: Iterable[tuple[str, int, int]]) -> None:
        """A batch that is like others in all but what its integers are went to the training; `extremes` of whole tensors of it."""
        self.batches += 1
        for key, low, high in extremes:
            known = self._known[key]
            if known.low is None or low < known.low or high > known.high:
                known.high = high if known.low is None else max(known.high, high)
                known.low = low if known.low is None else min(known.low, low)


def _odd(key: str, tensor: torch.Tensor, seen: Extremes, known: _Known) -> list[Oddity]:
    found = []
    if tensor.device not in known.devices and tensor.device.type == "meta":
        found.append(Oddity(kind="batch.device", key=key, usual="/".join(sorted(map(str, known.devices)))))
    if tensor.dtype not in known.dtypes and len(known.dtypes) == 1:
        found.append(Oddity(kind="batch.dtype", key=key, usual=str(next(iter(known.dtypes))).removeprefix("torch.")))
    if not seen.finite and not known.not_finite:
        found.append(Oddity(kind="batch.not_finite", key=key))
    return found
