"""What the interpreter calls when an object goes must be silent once it takes itself apart: the names of our modules are None by then, each in its turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["unless_finalizing"]


def unless_finalizing(told: Callable[..., object], /, *, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> Callable[..., None]:
    """For the callback of a weak reference, and for `__del__`. Uses no name of a module when it is called."""

    def call(*args: Any) -> None:
        if not is_finalizing():
            told(*args)

    return call
