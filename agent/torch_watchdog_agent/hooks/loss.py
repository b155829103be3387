"""The local loss of a micro-step: what backward starts from, before any all-reduce can spread a NaN."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import collective_failed, guarded, rank
from torch_watchdog_agent.hooks.scaler import unscaled

__all__ = ["known", "patch"]

_known = False  # the loss of the backward under way was seen where it was still the loop's own


def patch(module: ModuleType) -> None:
    theirs = module.backward

    @functools.wraps(theirs)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not _known:
            _seen(tensors)
        try:
            return theirs(tensors, *args, **kwargs)
        except RuntimeError as error:  # gradients are averaged in here
            collective_failed(error)
            raise

    module.backward = backward  # type: ignore[attr-defined]


@contextmanager
def known(loss: Any) -> Iterator[None]:
    """A framework is about to scale `loss` and run backward from the result: this one counts."""
    global _known
    _seen(loss)
    before, _known = _known, True
    try:
        yield
    finally:
        _known = before


@guarded("loss")
def _seen(tensors: Any) -> None:
    here = rank()
    if here is None:
        return
    import torch

    on_cuda = torch.cuda.is_initialized()
    if on_cuda and torch.cuda.is_current_stream_capturing():
        return  # (in a CUDA graph what is launched here would run again and again)
    if torch._C._current_graph_task_id() == -1:  # in no other backward, as one of a checkpointed layer is
        here.loop.backward_begun()
    loss = tensors if not isinstance(tensors, (list, tuple)) else tensors[0] if len(tensors) == 1 else None
    if hasattr(loss, "numel"):
        here.loss_seen(unscaled(loss), on_cuda=on_cuda)
