"""Why a loss is not finite: the same forward once more, on a copy of the model, and the first module whose output is not finite.

Owns that replay, on the model's own device. It runs on a deep copy under no_grad, so that nothing of the run is changed (the caller keeps the generators), and
never goes through a collective: a rank that communicated alone would hang the others.
Where that copy cannot be made (FSDP, a large model), a launch may ask for every forward of the run itself to be watched (`ModuleWatch`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_watchdog_agent.contract.calls import Call, outermost_module
from torch_watchdog_agent.contract.frames import ModuleNames
from torch_watchdog_agent.contract.where import Origin, flat_to_element
from torch_watchdog_agent.errors import of_a_signal
from torch_watchdog_proto.messages import BatchFact, BoundFact, Sample, Violation

__all__ = ["ModuleWatch", "not_finite_inside"]

_KIND = "activation.not_finite"
MAX_COPIED_BYTES = 1 << 30
SHARE_OF_FREE_MEMORY = 0.25  # of a GPU; the training must not run out of it
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
_HALF = "bfloat16 (bf16) or float32 (fp32)"


class _FoundError(Exception):
    """The forward need not go on."""


class _CommunicatesError(Exception):
    """The forward of this model is no rank's own affair."""


@dataclass(frozen=True, slots=True)
class _Finding:
    path: str
    module: torch.nn.Module
    out: torch.Tensor
    inputs: tuple[torch.Tensor, ...]


def not_finite_inside(call: Call, origin: Origin) -> Violation | None:
    """Where the forward of this batch goes wrong; None where it does not, or nobody can say."""
    try:
        return _found_inside(call, origin)
    except Exception as error:  # a model that cannot be copied, or called once more
        if of_a_signal(error):
            raise
        return None


def _found_inside(call: Call, origin: Origin) -> Violation | None:
    model = call.model()
    if model is None or not _may_be_copied(model):
        return None
    found = _first(copy.deepcopy(model), call, origin.leaves)
    return None if found is None else _violation(found, origin)


def _may_be_copied(model: torch.nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors}
    plain = all(type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.device.type in ("cpu", "cuda") for tensor in tensors)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not plain or len(devices) != 1 or not all(tensor.numel() for tensor in tensors) or size_bytes > MAX_COPIED_BYTES:
        return False
    (device,) = devices
    return device.type == "cpu" or bool(size_bytes < torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE_MEMORY)


def _first(model: torch.nn.Module, call: Call, leaves: Mapping[str, torch.Tensor]) -> _Finding | None:
    found: list[_Finding] = []

    def watch(path: str, module: torch.nn.Module) -> None:
        def look(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
            finding = _looked_at(path, module, (args, kwargs), out)
            if finding is not None:
                found.append(finding)
                raise _FoundError

        module.register_forward_hook(look, with_kwargs=True)

    for path, module in model.named_modules():
        watch(path, module)
    device = next(model.parameters()).device
    args, kwargs = call.filled({key: leaf.to(device) for key, leaf in leaves.items()})
    autocast = nullcontext() if call.autocast is None else torch.autocast(call.autocast[0], dtype=call.autocast[1])
    try:
        with torch.no_grad(), autocast, _Alone():
            model(*args, **kwargs)
    except (_FoundError, _CommunicatesError):
        pass
    return found[0] if found else None


def _looked_at(path: str, module: torch.nn.Module, given: Any, out: Any) -> _Finding | None:
    computes = any(True for _ in module.parameters(recurse=False))
    bad = next((tensor for tensor in _floats(out) if _is_bad(tensor, with_minus_infinity=computes)), None)
    return None if bad is None else _Finding(path, module, bad.detach(), tuple(tensor.detach() for tensor in _floats(given)))


def _is_bad(tensor: torch.Tensor, *, with_minus_infinity: bool) -> bool:
    """A NaN or an infinity. -inf alone is what masks are made of, where no weights are involved."""
    return bool((tensor.isnan() | (tensor.isinf() if with_minus_infinity else tensor.isposinf())).any())


class ModuleWatch:
    """The outputs of all modules in the run's own forwards, on request: each is waited for, which on a GPU costs a round trip a module.

    Changes nothing of what the modules compute. Not for compiled code, which has no modules left.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._first: _Finding | None = None
        self.close = register_module_forward_hook(self._look).remove

    def forget(self) -> None:
        """The loss is finite: whatever was not has not reached it."""
        self._first = None

    def found(self, origin: Origin | None) -> Violation | None:
        """The first module since the last finite loss whose output was not finite."""
        return None if self._first is None or origin is None else _violation(self._first, origin)

    def _look(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self._first is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with torch.no_grad(), _disable_current_modes():
                self._first = _looked_at("", module, args, out)
                if self._first is not None:
                    self._first = replace(self._first, path=self._path(module))

    def _path(self, module: torch.nn.Module) -> str:
        root = outermost_module()
        if root is not None and self._names.path(module) is None:
            self._names.learn(root)
        return self._names.path(module) or ""


class _Alone(TorchDispatchMode):  # type: ignore[misc]
    """Stops before anything is communicated."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in _COLLECTIVES:
            raise _CommunicatesError
        return func(*args, **(kwargs or {}))


def _floats(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        if item.is_floating_point() and item.numel():
            yield item
    elif isinstance(item, Mapping):
        for child in item.values():
            yield from _floats(child)
    elif isinstance(item, (list, tuple)):
        for child in item:
            yield from _floats(child)


# In words


def _violation(found: _Finding, origin: Origin) -> Violation:
    dtype = str(found.out.dtype).removeprefix("torch.")
    bad = ~torch.isfinite(found.out)
    element = flat_to_element(int(bad.reshape(-1).nonzero()[0]), found.out.shape)
    value, count = str(float(found.out[element])), int(bad.sum())
    sample = None if _is_broken(found.module) else _sample(found.out, element, origin)  # of broken weights no sample is the reason
    whose = found.path or type(found.module).__name__
    summary = f"the output of {whose} ({type(found.module).__name__}, {dtype}) is not finite: {value} in {count} of {bad.numel()} values"
    if sample is not None and sample.dataset_index is not None:
        summary += f", sample {sample.dataset_index} of the data set"
    cause, fix = _cause(found, whose, dtype)
    fact = BatchFact(key="(made by the model)", value=value, count=count, shape=tuple(found.out.shape), dtype=dtype, sample=sample)
    bound = BoundFact(op=type(found.module).__name__, module=found.path or None, learned_from="the same forward, once more")
    return Violation(kind=_KIND, summary=summary, cause=cause, fix=fix, batch=fact, bound=bound, repairable=False)


def _sample(out: torch.Tensor, element: tuple[int, ...], origin: Origin) -> Sample | None:
    """Modules mostly keep the batch first."""
    rows = {tensor.shape[0] for tensor in origin.leaves.values() if tensor.dim()}
    if rows != {out.shape[0] if out.dim() else -1}:
        return None
    return origin.sample(next(key for key, tensor in origin.leaves.items() if tensor.dim()), element[:1])


def _is_broken(module: torch.nn.Module) -> bool:
    return any(not bool(torch.isfinite(weight).all()) for weight in module.parameters(recurse=False))


def _cause(found: _Finding, whose: str, dtype: str) -> tuple[str, str]:
    weights = list(found.module.parameters(recurse=False))
    if _is_broken(found.module):
        return (
            f"The weights of {whose} are not finite any more: an earlier update broke them.",
            "Resume from the newest checkpoint that is finite, and look at the step before: learning rate, gradient clipping, loss scaling.",
        )
    if any(_is_bad(tensor, with_minus_infinity=False) for tensor in found.inputs):
        parent = whose.rpartition(".")[0] or "the model"
        return (
            f"{whose} was given values that are not finite, and no module before it made them: it is the code between the modules of {parent}.",
            "Look there for a division by zero, a logarithm or root of something not positive, or an exponential that is too large.",
        )
    largest = max((float(tensor.abs().max()) for tensor in found.inputs), default=0.0)
    reach = f"its inputs reach {largest:.4g}" + (f", its weights {max(float(w.abs().max()) for w in weights):.4g}" if weights else "")
    if found.out.dtype == torch.float16:
        return (
            f"{whose} computes in float16 (fp16, half precision), whose largest number is 65504, and overflows: {reach}, all finite.",
            f"Run this module in {_HALF}, which reach 3.4e38, or scale its inputs or its weights down.",
        )
    limit = f"{torch.finfo(found.out.dtype).max:.4g}"
    return (
        f"{whose} is the first module that makes something not finite: {reach}, all finite, in {dtype} (largest number {limit}).",
        "Look at this module for a division by zero, a logarithm or root of something not positive, an exponential or product that overflows.",
    )
