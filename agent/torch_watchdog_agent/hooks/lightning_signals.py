"""Lightning's own handler of SIGTERM, which each `fit()` installs: it ends the training behind a batch and saves nothing. A checkpoint and a stop of ours come
in its place, unless somebody wanted a handler there: the script, or Slurm's requeue.
"""

from __future__ import annotations

import functools
import signal
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks.active import guarded, rank

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    compose, connector = module._HandlersCompose, module._SignalConnector
    theirs = connector.register_signal_handlers

    @functools.wraps(theirs)
    def register(self: Any) -> None:
        theirs(self)
        _take_its_place(self, compose)

    connector.register_signal_handlers = register


@guarded("Lightning's signals")
def _take_its_place(connector: Any, compose: Any) -> None:
    here = rank()
    preemption = None if here is None else here.preemption
    handler: Any = signal.getsignal(signal.SIGTERM)
    if preemption is None or not isinstance(handler, compose):
        return
    if all(one == connector._sigterm_notifier_fn or preemption.is_its_own(one) for one in handler.signal_handlers):
        preemption.take(signal.SIGTERM)
