"""What the exit code of a launch may promise. Knows nothing of how it came to its end."""

from __future__ import annotations

from torch_watchdog_proto.messages import EXIT_BAD_DATA, EXIT_DIVERGED, EXIT_FAILED

__all__ = ["exit_code_of"]

_OF_A_FAULT = frozenset({EXIT_BAD_DATA, EXIT_DIVERGED})


def exit_code_of(asked: int, *, saved: bool) -> int:
    """The launch's, whose ranks leave on an order that names `asked`: a fault's says why, any other that a good checkpoint is there."""
    return asked if saved or asked in _OF_A_FAULT else EXIT_FAILED
