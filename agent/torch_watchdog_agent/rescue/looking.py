"""Where the training thread is just now, told by another thread of its process, and which collectives it has called.

Owns the reading of its Python frames. A thread that holds the interpreter's lock in native code keeps this from being told: the silence tells.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.errors import of_a_signal, text_of
from torch_watchdog_agent.rescue.flight import NOTHING, Flight, keep, read
from torch_watchdog_agent.rescue.words import innermost_own, words_of
from torch_watchdog_proto.rescue_words import GroupCalls, Look, Looked

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank
    from torch_watchdog_agent.rescue.gpu import OnGpu

__all__ = ["answer", "calls_at", "handled", "is_waiting", "looked_at", "recorded"]

MAX_STACK = 3000
_IN_VAIN = re.compile(r"tim(ed?|ing)[ -]?out", re.IGNORECASE)
# Where a healthy rank waits for another one: in a collective, or for the result of a backward that has collectives in it.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/distributed.py", "/torch/_tensor.py")
_CLEARANCE = "/torch_watchdog_agent/clearance.py"  # on a GPU Python waits there, and not in the collective, for a neighbour's batch
_CALLING = "/torch_watchdog_agent/hooks/collectives.py"  # hands a call on to the group, which may wait before it returns, as in a monitored_barrier
_RESCUER, _OURS_DEEP = "/torch_watchdog_agent/rescue/rescuer.py", 6
_OURS, _HOOKS = "/torch_watchdog_agent/", "/torch_watchdog_agent/hooks/"
_NOT_WAITING = ("/torch/distributed/elastic/", "/torch/distributed/checkpoint/", _OURS)


def answer(order: Look, rank: Rank, gpu: OnGpu, *, at: tuple[int, bool]) -> Looked:
    """Asked once the job has come to a standstill. `at`: the step, and whether the rank is between two."""
    from torch_watchdog_agent.hooks.distributed import group_timeout_s
    from torch_watchdog_agent.rescue.gpu import GLANCE_S

    waits, stack, where = looked_at()
    waits = waits or gpu.is_busy()
    timeout_s = group_timeout_s()
    flight = recorded(rank, device_answers=lambda: gpu.answers(rank.subjects.now(), within_s=GLANCE_S))
    return Looked(
        rank=rank.identity.rank, generation=order.generation, waits=waits, stack=stack + flight.lines, where=where, step=at[0], between=at[1],
        timeout_s=timeout_s if timeout_s < float("inf") else 0.0, calls=_calls(rank, flight), handles=handled(),
    )  # fmt: skip


def calls_at(error: BaseException, rank: Rank) -> tuple[GroupCalls, ...]:
    """What was called until this was raised. The flight recorder takes a tenth of a second: it is asked first only where the rank has waited in vain."""
    flight = recorded(rank, device_answers=lambda: True) if _IN_VAIN.search(text_of(error)) else NOTHING
    return _calls(rank, flight)


def recorded(rank: Rank, *, device_answers: Callable[[], bool]) -> Flight:
    """What torch has recorded by now; in a file, too. `device_answers`: whether a CUDA call would come back at all."""
    try:
        flight = read(device_answers=device_answers)
        keep(flight, Path(rank.config.run_dir) / "logs" / f"rank-{rank.identity.rank}.flight.json")
        return flight
    except Exception as error:  # noqa: BLE001  another torch's dump, a full disk, a device that is lost
        if of_a_signal(error):
            return NOTHING
        rank.say(f"torch's flight recorder could not be read ({type(error).__name__}: {error})")
        return NOTHING


def _calls(rank: Rank, flight: Flight) -> tuple[GroupCalls, ...]:
    from torch_watchdog_agent.hooks.collectives import calls_made

    try:
        return calls_made(flight)
    except Exception as error:  # noqa: BLE001  a failure is told without it
        rank.say(f"the collectives that were called are not known ({type(error).__name__}: {error})")
        return ()


def looked_at() -> tuple[bool, str, str]:
    """(whether it waits for other ranks, its stack, innermost last, and the user's line in it)."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False, "", ""
    frames = traceback.extract_stack(frame)
    waits = is_waiting([entry.filename for entry in frames])
    return waits, "".join(traceback.format_list(frames))[-MAX_STACK:], innermost_own(frames)


def handled() -> str:
    """What the training thread has caught, and is not done with: `ValueError: no such row at train.py:31`. Behind it a collective in a `finally` waits for
    ranks that never come. Empty where there is none."""
    caught: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = caught[1] if isinstance(caught, tuple) else caught  # as Python 3.11 has it
    if error is None:
        return ""
    words = words_of(error)
    return f"{words.text} at {words.where}" if words.where else words.text


def is_waiting(files: Sequence[str]) -> bool:
    """By the files of a stack's frames, innermost last. A function of ours that only hands on to torch's own stands between torch's frames."""
    files = [name for name in files if name != "<string>"]
    files = files[:-1] if files and files[-1].endswith(_CALLING) else files
    if not files:
        return False
    # One that has failed itself waits for our word: where it was is what it has told, and no place of its own.
    if files[-1].endswith(_CLEARANCE) or any(name.endswith(_RESCUER) for name in files[-_OURS_DEEP:]):
        return True
    if _OURS in files[-1]:
        return False
    innermost = [name for name in files if _HOOKS not in name][-3:]
    return any(part in name for name in innermost for part in _WAITING) and not any(
        part in name for name in innermost for part in _NOT_WAITING
    )
