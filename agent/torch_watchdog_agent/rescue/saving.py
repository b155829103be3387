"""The save of a rescue: the whole state by one rank, as it was after the last update that was applied.

Owns what "as it was" means where a step had begun: buffers, schedulers and generators of the window's start, and the place in the data before it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_proto.messages import Saved
from torch_watchdog_proto.rescue_words import Rescue

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.position import LoaderPosition
    from torch_watchdog_agent.rank import Rank

__all__ = ["save"]


def save(rank: Rank, order: Rescue, *, updates: int, windows_back: int) -> Saved:
    """Writes and digests; what fails becomes the answer's error. `updates`: how many the state has seen; `windows_back`:
    how many windows were begun after them.
    """
    from torch_watchdog_agent.checkpoint.alone import save_alone
    from torch_watchdog_agent.checkpoint.errors import in_words

    try:
        with rank.window.rewound() if windows_back == 1 else nullcontext():
            part = save_alone(
                Path(order.path), rank.subjects, rank=rank.identity.rank, updates_applied=updates,
                position=_position(rank, windows_back), say=rank.say, left_out=rank.quarantine.lines(),
            )  # fmt: skip
    except BaseException as error:  # noqa: BLE001  torch's CheckpointException is no Exception; whatever it is must reach the daemon
        return _saved(rank, order, updates, error=in_words(error))
    return _saved(rank, order, updates, finite=part.finite, files=part.files, format=part.format)


def _position(rank: Rank, windows_back: int) -> LoaderPosition:
    """The batches of steps that were not applied come again."""
    from torch_watchdog_agent.hooks.tracks import training_position

    position = training_position()
    return replace(position, batches=max(0, position.batches - windows_back * rank.loop.trained_on))


def _saved(rank: Rank, order: Rescue, updates: int, **fields: Any) -> Saved:
    return Saved(
        rank=rank.identity.rank, generation=order.generation, updates_applied=updates, path=order.path, **fields
    )  # fmt: skip
