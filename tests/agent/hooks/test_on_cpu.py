"""What stands in for a GPU in a replay, for a torch that insists on more than this one does."""

from __future__ import annotations

from abc import ABC
from types import SimpleNamespace

from torch_watchdog_agent.hooks import on_cpu


def test_a_still_stream_is_one_to_a_torch_whose_compiler_asks_for_the_abstract_class_by_name() -> None:
    class Event(ABC): ...

    on_cpu._called_by_their_names(SimpleNamespace(_EventBase=Event, _StreamBase=object))
    on_cpu._called_by_their_names(None)
    assert issubclass(on_cpu._Still, Event)
