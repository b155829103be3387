"""A script written for GPUs, on the CPU: only in a replay, where torch finds no GPU. What it asks of one is done by the CPU, gloo stands in for NCCL.

Owns nothing of a training: a launch that trains never comes here. What cannot be had without a GPU (a kernel of its own, `torch.Generator("cuda")`) raises
as it does without us.
"""

from __future__ import annotations

import functools
import re
import sys
from abc import ABCMeta
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import wrapt
from torch.overrides import TorchFunctionMode

__all__ = ["instead_of_gpus"]

_A_GPU = re.compile(r"cuda(:\d+)?$")
_CPU = torch.device("cpu")
_NOTHING = ("empty_cache", "init", "ipc_collect", "manual_seed", "manual_seed_all", "reset_max_memory_allocated", "reset_peak_memory_stats", "set_device",
            "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all", "synchronize")  # fmt: skip
_NAME = "none: a replay on the CPU"
_CAPABILITY, _MEMORY = (8, 0), 80 << 30  # of a GPU that takes bfloat16
_NONE_USED = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


def instead_of_gpus() -> None:
    """From now on, in this thread."""
    _in_torch_cuda(torch.cuda)
    fork = torch.random.fork_rng
    torch.random.fork_rng = lambda *_, enabled=True, **__: fork([], enabled)  # the CPU's generator alone
    torch.Tensor.record_stream = lambda *_: None
    torch.nn.Module.to = _without_gpus(torch.nn.Module.to)
    parallel = torch.nn.parallel.DistributedDataParallel
    parallel.__init__ = _on_no_device(parallel.__init__)
    parallel._passing_sync_batchnorm_handle = lambda *_: None  # it refuses SyncBatchNorm on the CPU, as that does itself
    torch.nn.SyncBatchNorm.forward = torch.nn.BatchNorm1d.forward
    if torch.distributed.is_available():
        from torch.distributed import device_mesh, distributed_c10d

        for module in (torch.distributed, distributed_c10d):
            for name in ("init_process_group", "new_group"):
                setattr(module, name, _by_gloo(getattr(module, name)))
        for module in (torch.distributed, device_mesh):
            module.init_device_mesh = _without_gpus(device_mesh.init_device_mesh)
    wrapt.register_post_import_hook(_trainer_on_cpu, "transformers.training_args")
    _OnCpu().__enter__()


class _OnCpu(TorchFunctionMode):  # type: ignore[misc]
    """Every call of torch that names a GPU names the CPU."""

    def __torch_function__(self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        args, kwargs = _named_cpu(args), _named_cpu_in(kwargs or {})
        if name == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _CPU, *args[2:])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _cpu_for(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and _A_GPU.match(value) else value


def _named_cpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(_cpu_for, args))


def _named_cpu_in(kwargs: dict[str, Any]) -> dict[str, Any]:
    named = {key: _cpu_for(value) for key, value in kwargs.items()}
    if type(named.get("device")) is int:
        named["device"] = _CPU
    return named


def _in_torch_cuda(cuda: Any) -> None:
    for name in _NOTHING:
        setattr(cuda, name, lambda *_, **__: None)
    for name in _NONE_USED:
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.get_rng_state, cuda.get_rng_state_all = (
        lambda *_: torch.empty(0, dtype=torch.uint8, device="cpu"),
        list,
    )  # torch.random.fork_rng asks
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1  # a script may divide by it
    cuda.is_bf16_supported, cuda.get_device_name = lambda *_, **__: True, lambda *_: _NAME
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name=_NAME, major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=_MEMORY, multi_processor_count=108, warp_size=32
    )
    cuda.get_device_capability, cuda.mem_get_info = lambda *_: _CAPABILITY, lambda *_: (_MEMORY, _MEMORY)
    cuda.Event, cuda.Stream = _Still, _Still
    _called_by_their_names(sys.modules.get("torch._streambase"))
    cuda.current_stream = cuda.default_stream = lambda *_: _Still()
    cuda.stream = cuda.device = lambda *_: nullcontext()


def _called_by_their_names(module: Any) -> None:
    """torch before 2.6 imports its compiler with the first optimizer, which insists on these classes."""
    for name in ("_EventBase", "_StreamBase"):
        kind = getattr(module, name, None)
        if isinstance(kind, ABCMeta):
            kind.register(_Still)


class _Still:
    """A stream or an event where nothing is queued."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Still()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _without_gpus(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.to` and `init_device_mesh`, which look at the device themselves."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = _named_cpu(args)
        if isinstance(args[0], torch.nn.Module) and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _CPU, *args[2:])
        return theirs(*args, **_named_cpu_in(kwargs))

    return call


def _on_no_device(theirs: Callable[..., None]) -> Callable[..., None]:
    """DDP takes no numbers of devices for a module on the CPU."""

    @functools.wraps(theirs)
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
        theirs(self, module, None, None, *args, **kwargs)

    return init


def _trainer_on_cpu(module: Any) -> None:
    """Its arguments refuse what a script says of a GPU's precision."""
    theirs = module.TrainingArguments.__post_init__

    @functools.wraps(theirs)
    def begin(self: Any) -> None:
        self.use_cpu, self.tf32, self.fp16 = True, None, False
        theirs(self)

    module.TrainingArguments.__post_init__ = begin


def _by_gloo(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if "nccl" in str(kwargs.get("backend") or ""):
            kwargs["backend"] = "gloo"
        return theirs(*("gloo" if isinstance(value, str) and "nccl" in value else value for value in args), **kwargs)

    return made
