"""Where the training thread is just now, told by another thread of its process.

Owns the reading of its Python frames. A thread that holds the interpreter's lock in native code keeps this from being told: the silence tells.
"""

from __future__ import annotations

import sys
import threading
import traceback

from torch_watchdog_agent.rescue.words import innermost_own

__all__ = ["looked_at"]

MAX_STACK = 3000
# Where a healthy rank waits for another one: in a collective, or for the result of a backward that has collectives in it.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/distributed.py", "/torch/_tensor.py")
_CLEARANCE = "/torch_watchdog_agent/clearance.py"  # on a GPU Python waits there, and not in the collective, for a neighbour's batch
_NOT_WAITING = ("/torch/distributed/elastic/", "/torch/distributed/checkpoint/", "/torch_watchdog_agent/")


def looked_at() -> tuple[bool, str, str]:
    """(whether it waits for other ranks, its stack, innermost last, and the user's line in it)."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False, "", ""
    frames = traceback.extract_stack(frame)
    innermost = [entry for entry in frames if entry.filename != "<string>"][-3:]
    in_collective = any(part in entry.filename for entry in innermost for part in _WAITING) and not any(
        part in entry.filename for entry in innermost for part in _NOT_WAITING
    )
    waits = in_collective or innermost[-1].filename.endswith(_CLEARANCE)
    return waits, "".join(traceback.format_list(frames))[-MAX_STACK:], innermost_own(frames)
