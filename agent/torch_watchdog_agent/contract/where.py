"""Which cell and which sample of the batch is meant. Owns the mapping from tensors to samples; blames nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_watchdog_agent.contract.findings import Past
from torch_watchdog_agent.contract.fits import Unfit
from torch_watchdog_agent.contract.forms import Form
from torch_watchdog_proto.messages import Sample

__all__ = ["Origin", "comparable", "flat_to_element", "lengths_of", "value_at"]

IGNORED = -100


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: one is made for each batch
class Origin:
    """Where a batch came from: the sampler's indices, the worker, its tensors (`leaves`: what can be read of them; `own`: as the loop has them).

    `forms`: which of them are an array or a list. `past`: what was seen before of tensors that are not as they were. `reformed`, `retyped`, `unfit`,
    `lacks`: what is odd about it and may be harmless.
    """

    leaves: Mapping[str, torch.Tensor]
    indices: Sequence[int | None] | None
    worker: int | None
    past: Mapping[str, Past] | None = None
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    reformed: Mapping[str, Form] | None = None  # and which form each of these always had
    retyped: Mapping[str, str] | None = None  # and which dtype each of these tensors always had
    unfit: Unfit | None = None
    lacks: Sequence[str] = ()
    teaches: bool = True  # it holds something that a model can take

    def device(self, key: str) -> torch.device:
        """Where the loop has that tensor."""
        return self.own.get(key, self.leaves[key]).device

    def sample(self, key: str, element: tuple[int, ...] | None) -> Sample | None:
        """The sample that an element of a tensor belongs to."""
        position = self._position(key, element)
        if position is None:
            return Sample(worker=self.worker) if self.worker is not None else None
        index = self.indices[position] if self.indices is not None and position < len(self.indices) else None
        return Sample(position_in_batch=position, dataset_index=index, worker=self.worker)

    def _position(self, key: str, element: tuple[int, ...] | None) -> int | None:
        if self.indices is not None and len(self.indices) == 1:
            return 0
        if not element:
            return None
        tensor, count = self.leaves[key], len(self.indices) if self.indices is not None else None
        if count is None or (tensor.dim() and tensor.shape[0] == count):
            return element[0]
        owner = self._owner(key, tensor.shape[0], count)
        return int(owner[element[0]]) if owner is not None else None

    def _owner(self, key: str, rows: int, count: int) -> torch.Tensor | None:
        """A tensor that tells which sample each of `rows` flat rows belongs to (`batch_idx`): non-decreasing sample numbers."""
        for name, tensor in self.leaves.items():
            if name == key or tensor.dim() != 1 or tensor.shape[0] != rows or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
                continue
            if rows and int(tensor.min()) >= 0 and int(tensor.max()) < count and bool((tensor.diff() >= 0).all()):
                return tensor
        return None


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers where torch can compare them: of uint16 and wider it cannot."""
    return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor


def flat_to_element(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of the flat position in a tensor of this shape."""
    element = []
    for length in reversed(shape):
        flat, place = divmod(flat, length)
        element.append(place)
    return tuple(reversed(element))


def value_at(tensor: torch.Tensor, element: tuple[int, ...]) -> int | float:
    """The number in that cell."""
    value = tensor[element].item()
    return int(value) if isinstance(value, (bool, int)) else float(value)


def lengths_of(leaves: Mapping[str, torch.Tensor], rows: int, columns: int, key: str) -> list[int] | None:
    """How far the real content of each row goes: by a mask of that shape, by labels, else by the tensor's own constant tail."""
    shaped = {
        name: comparable(t)
        for name, t in leaves.items()
        if t.shape == (rows, columns) and not t.dtype.is_floating_point and t.device.type == "cpu"
    }
    for name, tensor in shaped.items():
        if "mask" in name and int(tensor.min()) >= 0 and int(tensor.max()) <= 1:
            return _reach(tensor != 0)
    own = shaped.get(key)
    if own is None:
        return None
    if bool((own == IGNORED).any()):
        return _reach(own != IGNORED)
    return [
        columns if full else length
        for full, length in zip((own[:, -2:] != own[:, -1:]).any(1).tolist(), _reach(own != own[:, -1:]), strict=True)
    ]


def _reach(real: torch.Tensor) -> list[int]:
    """One past the last real cell of each row."""
    place = torch.arange(1, real.shape[1] + 1, device="cpu")
    return [int(length) for length in (real * place).amax(1)]
