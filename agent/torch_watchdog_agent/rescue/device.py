"""The gate on the device: how far its updates are, and a word in pinned memory that keeps the next one from running.

On a GPU Python is ahead: the kernels of an update may be queued behind a collective that will never end. Breaking that collective lets them run with
garbage. So before every update the stream is told to wait until a word is 0, and two words are written around it: the update that was begun and the one
that is done. Closing the gate is one store to memory; reading the parameters on another stream then gives the state after exactly `done` updates.
Owns the page and the two calls of the CUDA driver (through ctypes: torch has none of them). Where they cannot be had nothing is gated, and said so.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["DeviceGate", "abort_groups", "of_this_process"]

_WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_GATE, _BEGUN, _DONE = 0, 1, 2
PROBE_S = 3.0


class DeviceGate:
    """One per process, for the device that its updates run on. Raises OSError or AttributeError where the driver lacks the calls."""

    def __init__(self) -> None:
        import torch

        driver = ctypes.CDLL("libcuda.so.1")
        self._wait = getattr(driver, "cuStreamWaitValue32_v2", None) or driver.cuStreamWaitValue32
        self._write = getattr(driver, "cuStreamWriteValue32_v2", None) or driver.cuStreamWriteValue32
        for call in (self._wait, self._write):
            call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            call.restype = ctypes.c_int
        self._page = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self._address = int(self._page.data_ptr())
        self._words = (ctypes.c_int32 * 64).from_address(self._address)
        self._current_stream = torch.cuda.current_stream
        self._is_capturing = torch.cuda.is_current_stream_capturing
        self.missed = False  # an update ran without the gate (a captured graph): from then on nothing is known

    # The training thread, around each update

    def before_update(self, number: int) -> None:
        """Behind everything that was launched: wait for the gate, then note that update `number` (from 1) has begun."""
        if self._is_capturing():
            self.missed = True
            return
        stream = self._current_stream().cuda_stream
        self._check(self._wait(stream, self._address + 4 * _GATE, 0, _WAIT_EQUAL))
        self._check(self._write(stream, self._address + 4 * _BEGUN, number, 0))

    def after_update(self, number: int) -> None:
        if not self._is_capturing():
            self._check(self._write(self._current_stream().cuda_stream, self._address + 4 * _DONE, number, 0))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver refuses stream memory operations (error {status})")

    # Any thread; none of these is a CUDA call

    def close(self) -> None:
        self._words[_GATE] = 1

    def open(self) -> None:
        self._words[_GATE] = 0

    @property
    def done(self) -> int:
        return int(self._words[_DONE])

    @property
    def is_between_updates(self) -> bool:
        return self._words[_BEGUN] == self._words[_DONE]


_gate: DeviceGate | None = None
_without = False


def of_this_process(parameter: Any) -> DeviceGate | None:
    """The gate, where the update's parameters are on a CUDA device. Raises what keeps it from being made, once."""
    global _gate, _without
    if _gate is None and not _without and parameter is not None and parameter.is_cuda:
        _without = True
        _gate = DeviceGate()
    return _gate


def answers() -> bool:
    """Whether another thread of this process can still use the device: a full launch queue holds the driver's lock."""
    import torch

    done = threading.Event()

    def probe() -> None:
        with beside():
            torch.zeros(1, device="cuda").cpu()
        done.set()

    threading.Thread(target=probe, name="torch-watchdog-probe", daemon=True).start()
    return done.wait(PROBE_S)


@contextmanager
def beside() -> Iterator[None]:
    """The body's device work runs on a stream of its own, which waits for nothing."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def abort_groups(say: Callable[[str], None], *, timeout_s: float = 10.0) -> None:
    """Breaks every collective of this process, so that its training thread comes back. Only once nothing can be poisoned any more."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return

    def abort() -> None:
        try:
            module._abort_process_group()
        except Exception as error:  # noqa: BLE001  torch of another version; the rank is ended by its launcher then
            say(f"the process groups could not be aborted ({type(error).__name__}: {error})")

    thread = threading.Thread(target=abort, name="torch-watchdog-abort", daemon=True)
    thread.start()
    thread.join(timeout_s)
