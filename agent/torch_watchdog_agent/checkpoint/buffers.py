"""Copies of the buffers that change while a model trains, kept from the start of one update window to its end.

Owns learning which buffers those are, and the copies. A buffer counts as changing when it is a normalisation layer's statistic (torch's
kernels write those without raising the tensor's version), or when its version or identity has changed between two windows. For the first
few windows every small buffer is kept, so that a veto does not find the learning unfinished, and contents are compared, because what is written
through `.data` raises no version either; that waits for a device. After them nothing does: copies run on the device's own stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch_watchdog_agent.finalizing import unless_finalizing

_LEARNING_WINDOWS = 4
_SMALL_BYTES = 1 << 20
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Slot:
    """One place in one module. `copy` is None while the buffer is only watched."""

    __slots__ = ("changes", "copy", "holder", "key", "mark", "name", "tensor", "version")

    def __init__(self, name: str, holder: dict[str, Any], key: str) -> None:
        self.name, self.holder, self.key = name, holder, key
        self.tensor = holder[key]
        self.version = _version(self.tensor)
        self.copy: Any = None
        self.mark: Any = None  # of the content of one that is too large to keep while learning
        self.changes = key in _STATISTICS


class Buffers:
    """The buffers of some models. Made anew whenever the models change."""

    def __init__(self, models: Iterable[Any], *, max_bytes: int, say: Callable[[str], None]) -> None:
        self._of_models = {weakref.ref(model, unless_finalizing(self._forget)): _slots_of(model) for model in models}
        self._max_bytes = max_bytes
        self._say = say
        self._said: set[str] = set()
        self._windows = self._chosen_at = 0
        self._watched: list[_Slot] = []
        self._kept: list[_Slot] = []
        self._batches: list[tuple[list[Any], list[Any]]] = []
        self._choose()

    def keep(self, *, updates: int = 0) -> None:
        """Copy what changes, after so many updates. About 1 us a buffer on the CPU; a handful of launches on a GPU."""
        self._windows += 1
        if self._noticed_change() or self._windows == _LEARNING_WINDOWS:
            self._choose()
            self._chosen_at = updates
        if not self._batches:
            return
        import torch

        with torch.no_grad():
            for copies, tensors in self._batches:
                torch._foreach_copy_(copies, tensors)

    def put_back(self) -> None:
        """Give every kept buffer the content, and the tensor, that it had at the last `keep`."""
        import torch

        with torch.no_grad():
            try:
                for copies, tensors in self._batches:
                    torch._foreach_copy_(tensors, copies)
            except RuntimeError:  # one that cannot be written where it lies
                for slot in self._kept:
                    slot.tensor = _with_content(slot.tensor, slot.copy)
                self._batches = _by_kind(self._kept)
        for slot in self._kept:
            slot.holder[slot.key] = slot.tensor
            slot.version = _version(slot.tensor)

    def present(self) -> Callable[[], None]:
        """Copy the same buffers as they are now; the function that is returned puts that back. For once in a while: it allocates."""
        import torch

        slots = [(slot.holder, slot.key, tensor) for slot in self._kept if (tensor := slot.holder.get(slot.key)) is not None]
        copies = [local_of(tensor).detach().clone() for _, _, tensor in slots]

        def put_present_back() -> None:
            with torch.no_grad():
                for (holder, key, tensor), copy in zip(slots, copies, strict=True):
                    holder[key] = _with_content(tensor, copy)

        return put_present_back

    def versions(self) -> tuple[tuple[int, int], ...]:
        """Which tensor lies in each place, and how often it was written to by torch's own count; a batch norm counts its batches so."""
        slots = (slot for of_one in self._of_models.values() for slot in of_one)
        return tuple((id(tensor), _version(tensor)) for tensor in (slot.holder.get(slot.key) for slot in slots))

    def why_not(self, updates: int) -> str:
        """Why a copy of each buffer as it was after so many updates is not at hand, or nothing."""
        without = next((slot.name for slot in self._watched if slot.changes or _has_moved(slot)), "")
        if without:
            return f"the step at hand may have changed its model's buffer {without}, of which no copy is kept"
        if self._chosen_at > updates:
            return "which of its model's buffers a step changes was learned only since"
        return ""

    def reading_copies(self, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`read` of a nested state, with the copy in the place of every kept buffer."""
        copies = {_place(tensor): slot.copy for slot in self._kept if (tensor := slot.holder.get(slot.key)) is not None}

        def replaced(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: replaced(item) for key, item in value.items()}
            if type(value) in (list, tuple):
                return type(value)(replaced(item) for item in value)
            return copies.get(_place(value), value) if hasattr(value, "_version") and value.numel() else value

        return lambda value: read(replaced(value))

    def _forget(self, model: weakref.ref[Any]) -> None:
        """It was the user's to delete: no buffer of it is held any longer."""
        gone = set(map(id, self._of_models.pop(model, ())))
        self._watched = [slot for slot in self._watched if id(slot) not in gone]
        self._kept = [slot for slot in self._kept if id(slot) not in gone]
        self._batches = _by_kind(self._kept)

    def _noticed_change(self) -> bool:
        """Look at every slot; True where the choice of what to keep must be made anew."""
        anew, learning = False, self._windows <= _LEARNING_WINDOWS
        for slot in self._watched:
            if _has_moved(slot) or (learning and _marked_otherwise(slot)):
                anew |= not slot.changes
                _note_change(slot, slot.holder.get(slot.key))
        for slot in self._kept:
            tensor = slot.holder.get(slot.key)
            if tensor is not slot.tensor:
                anew = True
                _note_change(slot, tensor)
            elif not slot.changes and (_version(tensor) != slot.version or (learning and not local_of(tensor).equal(slot.copy))):
                _note_change(slot, tensor)
        return anew

    def _choose(self) -> None:
        learning = self._windows < _LEARNING_WINDOWS
        slots = [slot for of_one in self._of_models.values() for slot in of_one]
        present = [slot for slot in slots if slot.tensor is not None]
        wanted = [slot for slot in present if slot.changes or (learning and _bytes(slot.tensor) <= _SMALL_BYTES)]
        self._kept = _that_fit(wanted, self._max_bytes)
        kept = set(map(id, self._kept))
        self._watched = [slot for slot in slots if id(slot) not in kept]
        for slot in self._watched:
            slot.copy = None
        for slot in self._kept:
            slot.copy = slot.copy if _alike(slot.copy, slot.tensor) else local_of(slot.tensor).detach().clone()
        self._batches = _by_kind(self._kept)
        for name in {slot.name for slot in self._watched if slot.changes} - self._said:
            self._said.add(name)
            self._say(f"buffer {name} changes in training and is too large to keep a copy of: a vetoed step does not put it back")


def _slots_of(model: Any) -> list[_Slot]:
    named = ((f"{path}.{key}" if path else key, module, key) for path, module in model.named_modules() for key in module._buffers)
    return [_Slot(name, module._buffers, key) for name, module, key in named if module._buffers[key] is not None]


def _with_content(tensor: Any, copy: Any) -> Any:
    """The tensor with this content; another one where it cannot be written (a view whose elements lie in one place, one made for inference)."""
    try:
        local_of(tensor).copy_(copy)
    except RuntimeError:
        if local_of(tensor) is not tensor:
            raise
        return copy.clone()
    return tensor


def _marked_otherwise(slot: _Slot) -> bool:
    """Whether the sum over the content is another one than at the last look: written through `.data`, it has no other version."""
    tensor = slot.holder.get(slot.key)
    local = None if tensor is None else local_of(tensor).detach()
    before, slot.mark = slot.mark, None if local is None else local.sum().item()
    return before is not None and before != slot.mark


def _has_moved(slot: _Slot) -> bool:
    """Whether the buffer is another one, or another version, than at the last look."""
    tensor = slot.holder.get(slot.key)
    return tensor is not slot.tensor or _version(tensor) != slot.version


def _place(tensor: Any) -> tuple[int, tuple[int, ...], Any]:
    """Where a tensor's values are, whichever object stands for it."""
    local = local_of(tensor)
    return local.data_ptr(), tuple(local.shape), local.dtype


def _note_change(slot: _Slot, tensor: Any) -> None:
    slot.changes, slot.tensor, slot.version = True, tensor, _version(tensor)


def _version(tensor: Any) -> int:
    try:
        version: int = tensor._version
    except (RuntimeError, AttributeError):  # an inference tensor has none, and a buffer may be None
        return -1
    return version


def _that_fit(slots: list[_Slot], max_bytes: int) -> list[_Slot]:
    """The smaller ones first, until the budget is spent; in the order that they came in."""
    fitting: set[int] = set()
    for slot in sorted(slots, key=lambda slot: _bytes(slot.tensor)):
        max_bytes -= _bytes(slot.tensor)
        if max_bytes < 0:
            break
        fitting.add(id(slot))
    return [slot for slot in slots if id(slot) in fitting]


def _by_kind(slots: list[_Slot]) -> list[tuple[list[Any], list[Any]]]:
    """(copies, tensors) of one device and dtype each: then one launch copies many."""
    kinds: dict[tuple[Any, Any], tuple[list[Any], list[Any]]] = {}
    for slot in slots:
        tensor = local_of(slot.tensor).detach()
        copies, tensors = kinds.setdefault((tensor.device, tensor.dtype), ([], []))
        copies.append(slot.copy)
        tensors.append(tensor)
    return list(kinds.values())


def _alike(copy: Any, tensor: Any) -> bool:
    local = local_of(tensor)
    return copy is not None and copy.shape == local.shape and copy.dtype == local.dtype and copy.device == local.device


def _bytes(tensor: Any) -> int:
    local = local_of(tensor)
    size: int = local.numel() * local.element_size()
    return size


def local_of(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
