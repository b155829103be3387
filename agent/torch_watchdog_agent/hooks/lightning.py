"""Lightning (`lightning` and `pytorch_lightning`): its loops take batches from a fetcher, which may be some batches ahead."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch_watchdog_agent.checkpoint import by_lightning
from torch_watchdog_agent.hooks import lightning_resume
from torch_watchdog_agent.hooks.active import guarded, rank
from torch_watchdog_agent.hooks.looked_at import Pass
from torch_watchdog_agent.hooks.passes import ask, asking, begin
from torch_watchdog_agent.hooks.tracks import asks_first

__all__ = ["patch"]

_MARK, _BEHIND = "_torch_watchdog_pass", "_torch_watchdog_resuming"
BATCH = 0  # of (batch, its number, the number of its loader)


def patch(module: ModuleType) -> None:
    fetcher = module._PrefetchDataFetcher
    iterate, following = fetcher.__iter__, fetcher.__next__

    @functools.wraps(iterate)
    def begin_pass(self: Any) -> Any:
        resuming = lightning_resume.take(self)
        one = begin(self)
        with asking(one):
            result = iterate(self)
        if resuming is not None:
            resuming = lightning_resume.begun(resuming)
        self.__dict__.update({_MARK: one, _BEHIND: resuming})
        return result

    @functools.wraps(following)
    def next_batch(self: Any) -> Any:
        resuming = self.__dict__.pop(_BEHIND, None)
        if resuming is not None:
            lightning_resume.catch_up(resuming, self, self.__dict__[_MARK])
        one = self.__dict__.setdefault(_MARK, Pass())
        _count(self, one)
        return ask(one, lambda: following(self), part=BATCH)

    fetcher.__iter__, fetcher.__next__ = begin_pass, next_batch


@guarded("Lightning's count")
def _count(fetcher: Any, one: Pass) -> None:
    """It knows how many batches there are, so it never comes to hear that an epoch's pass has no more."""
    here = rank()
    if here is not None and by_lightning.asks_for_batch(here.loop.steps_ended(0), fetcher):
        asks_first(one.stand)
