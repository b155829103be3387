"""numpy as the daemon loads it: with the first steps that come, and without a pool of as many threads as the machine has cores.

The rules only compare and sort, for which such a pool does nothing; on a host of 200 cores with a limit on processes its making can fail aloud.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

__all__ = ["load_numpy"]

_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Once. Where it cannot be loaded, the rules say so when they need it."""
    if "numpy" in sys.modules:
        return
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    with suppress(Exception):
        import numpy  # noqa: F401
    if before is None:
        os.environ.pop(_THREADS, None)
    else:
        os.environ[_THREADS] = before
