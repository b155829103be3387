"""What a node process knows of the job's end by itself: the orders that passed through it, and what its ranks said.

Stands in for the daemon's answer where the daemon is gone by the end: the exit code must not depend on it. Pure.
"""

from __future__ import annotations

from torch_watchdog_agent.node.config import JobOutcome
from torch_watchdog_proto.messages import EXIT_BAD_DATA, Commit, Hold, Left, Order, RankMessage, Refused

__all__ = ["LastWords"]


class LastWords:
    """Hears everything that passes between the ranks of this node and the daemon."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}  # generation -> the exit code of its Commit
        self._left: int | None = None
        self._found: dict[tuple[int, int], str] = {}

    def told(self, order: Order) -> None:
        if isinstance(order, Commit):
            self._codes[order.generation] = order.exit_code

    def heard(self, message: RankMessage) -> None:
        if isinstance(message, Left):
            self._left = message.generation
        elif isinstance(message, Hold | Refused):
            self._found[message.rank, message.step] = f"rank {message.rank}, step {message.step}: {message.violation.summary}"

    def outcome(self, exit_code: int, *, why: str) -> JobOutcome:
        """How the job ended, as far as it is known here. `why` there is no better answer becomes a line."""
        stopped = self._codes.get(self._left) if self._left is not None else None
        if stopped is None and self._found and exit_code != 0:
            stopped = EXIT_BAD_DATA  # a rank refused the batch and failed of it
        return JobOutcome(exit_code=stopped, lines=(why, *list(self._found.values())[:4]))
