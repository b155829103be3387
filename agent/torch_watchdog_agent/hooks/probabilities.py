"""How near to 0 and 1 the probabilities come that binary_cross_entropy is given: past either it fails, and on a GPU by an assertion.

Where a sigmoid, softmax or clamp has made them they cannot leave the range, and nothing is looked at.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, is_training_thread, made_rank
from torch_watchdog_agent.unread import is_captured

__all__ = ["patch"]

_BOUNDED = ("SigmoidBackward", "SoftmaxBackward", "ClampBackward", "ClampMinBackward", "HardsigmoidBackward")
_MOST = 1 << 16  # elements that are looked at


def patch(module: ModuleType) -> None:
    """Below torch.nn.functional, which TorchScript compiles from its source; `module` is its list of operators, made later from what is there then."""
    natives = module.torch._C._nn
    theirs = natives.binary_cross_entropy

    @functools.wraps(theirs)
    def binary_cross_entropy(given: Any, *args: Any, **kwargs: Any) -> Any:
        _seen(given)
        return theirs(given, *args, **kwargs)

    natives.binary_cross_entropy = binary_cross_entropy


@guarded("probabilities")
def _seen(given: Any) -> None:
    import torch

    here = made_rank()  # a loss alone is no sign of a training: it makes no process a rank
    made_by = given.grad_fn if type(given) is torch.Tensor else None
    if here is None or made_by is None or not is_training_thread() or made_by.name().startswith(_BOUNDED):
        return
    if not here.guarding or here.guard.tracing or _is_no_plain_step(torch):
        return
    here.history.reach_seen(_reach(given.detach()))


def _is_no_plain_step(torch: Any) -> bool:
    """What is compiled, captured or transformed is not to be changed."""
    changed = (
        torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    )
    return bool(changed) or is_captured()


def _reach(given: Any) -> Any:
    """The largest |2p - 1|, over a part of very many."""
    flat = given.reshape(-1) if given.is_contiguous() else given.flatten()
    low, high = flat[:: -(-flat.numel() // _MOST) or 1].aminmax()
    return (2 * high - 1).maximum(1 - 2 * low)
