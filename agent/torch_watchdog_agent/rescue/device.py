"""The gate on the device: how far its updates are, and a word in pinned memory that keeps the next one from running.

On a GPU Python is ahead: the kernels of an update may be queued behind a collective that will never end. Breaking that collective lets them run with
garbage. So before every update the stream is told to wait until a word is 0, and two words are written around it: the update that was begun and the one
that is done. Closing the gate is one store to memory; reading the parameters on another stream then gives the state after exactly `done` updates.
Owns where the words lie (in the rank's ring, so that they outlive it), the calls of the CUDA driver (through ctypes: torch has none of them), and the
reading behind a closed gate: plain copies to the host on a stream made beforehand, no kernel, no allocation on the device, in a thread that may be given
up: a kernel's first use, a free, or a wait for the default stream would wait for the stuck one. So would whoever makes an event or a stream while a launch
waits for room in its queue, and the driver's lock makes all who come behind that one wait, too. Where the driver lacks the calls nothing is gated, and said so.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from torch_watchdog_agent.streams import current_stream
from torch_watchdog_proto.record import DEVICE_WORDS_BYTES, UPDATES_DONE

__all__ = ["DeviceGate", "abort_groups", "of_this_process", "to_host"]

T = TypeVar("T")

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_REGISTER = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_LOST = frozenset({214, 220, 700, 702, 710, *range(714, 720)})  # errors of the driver after which the context is gone (cuda.h)
_GATE, _BEGUN, _DONE, _OPENED = 0, 1, UPDATES_DONE, 3
STALL_S = 10.0  # for one tensor's copy, and what it takes at a tenth of the slowest bus besides
_SLOW_BYTES_S = 200e6
ABORT_S = 10.0  # for an abort, which may wait for a device that never answers
_POLL_S = 0.01
_LOOK_S = 1.0  # whether the copy under way takes too long


class DeviceGate:
    """One per process, for the `device` that its updates run on. `shared`: memory for its words; None, or where the driver does not take it: memory of its
    own. Raises OSError or AttributeError where the driver lacks the calls."""

    def __init__(self, device: Any, shared: memoryview | None = None) -> None:
        import torch

        driver = ctypes.CDLL("libcuda.so.1")
        self._wait = getattr(driver, "cuStreamWaitValue32_v2", None) or driver.cuStreamWaitValue32
        self._write = getattr(driver, "cuStreamWriteValue32_v2", None) or driver.cuStreamWriteValue32
        for call in (self._wait, self._write):
            call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            call.restype = ctypes.c_int
        self._device, self._beside = device, torch.cuda.Stream(device)
        self._driver, self._context, self._launched = driver, ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.stream(self._beside):
            if driver.cuCtxGetCurrent(ctypes.byref(self._context)) or driver.cuEventCreate(ctypes.byref(self._launched), _DISABLE_TIMING):
                raise OSError("the CUDA driver makes no event")
        self._unanswered: dict[str, Future[Any]] = {}
        self._words, self._address = _registered(driver, shared) or _pinned()
        self._updates_on = torch.cuda.current_stream(device)
        self._is_capturing = torch.cuda.is_current_stream_capturing
        self.missed = False  # an update ran without the gate (a captured graph): from then on nothing is known
        self._give_up_at = math.inf  # when the copy under way has taken too long

    # The training thread

    def opened(self, number: int) -> None:
        """What is copied at the start of the window that will be update `number` (from 1) was launched."""
        self._note(_OPENED, number)

    def before_update(self, number: int) -> None:
        """Behind everything that was launched: wait for the gate, then note that update `number` (from 1) has begun."""
        if self._is_capturing():
            self.missed = True
            return
        self._updates_on = current_stream()
        stream = self._updates_on.cuda_stream
        self._check(self._wait(stream, self._address + 4 * _GATE, 0, _WAIT_EQUAL))
        self._check(self._write(stream, self._address + 4 * _BEGUN, number, 0))

    def after_update(self, number: int) -> None:
        self._note(_DONE, number)

    def _note(self, word: int, number: int) -> None:
        if not self._is_capturing():
            self._check(self._write(current_stream().cuda_stream, self._address + 4 * word, number, 0))

    def _check(self, status: int) -> None:
        """Of a device that is lost the training's next call says so; the words tell still how far it had come."""
        if status and status not in _LOST:
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
    def opened_last(self) -> int:
        return int(self._words[_OPENED])

    @property
    def is_between_updates(self) -> bool:
        return bool(self._words[_BEGUN] == self._words[_DONE])

    # A rescue

    def read(self, work: Callable[[], T], *, within_s: float) -> T:
        """The work's result, its device work on a stream that waits for nothing. Raises TimeoutError where the device does not answer.

        A full launch queue, say: the training thread then sits in the driver and holds its lock.
        """
        answer = self._begun(work)
        deadline = time.monotonic() + within_s
        while True:
            try:
                return answer.result(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except FutureTimeout:
                now = time.monotonic()
                if now >= self._give_up_at:
                    raise TimeoutError(
                        "the device does not answer any more: its launch queue has filled up meanwhile, say, behind a collective that another rank is not in"
                    ) from None
                if now >= deadline:
                    raise TimeoutError(f"the device did not answer within {within_s:g} s") from None

    def _begun(self, work: Callable[[], T]) -> Future[T]:
        """What becomes of the work in a thread of its own. Raises TimeoutError where the machine gives none any more."""
        import torch

        answer: Future[T] = Future()

        def reading() -> None:
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(self._beside):
                    answer.set_result(work())
            except BaseException as error:  # noqa: BLE001  whatever it is: the thread that waits gets it
                answer.set_exception(error)

        try:
            threading.Thread(target=reading, name="torch-watchdog-reading", daemon=True).start()
        except RuntimeError as error:
            raise TimeoutError(f"the device cannot be asked: {error}") from None
        return answer

    def to_host(self, value: Any) -> Any:
        """As the function, and a copy that takes too long is given up: a launch that fills the queue keeps the driver's lock, for all threads."""

        def copied(copy: Any, tensor: Any) -> Any:
            self._give_up_at = time.monotonic() + STALL_S + tensor.numel() * tensor.element_size() / _SLOW_BYTES_S
            copy.copy_(tensor)
            self._give_up_at = math.inf
            return copy

        return to_host(value, copied)

    def is_busy(self, *, within_s: float) -> bool:
        """Whether what is launched by now is still not done after so long: a collective that another rank is not in, say. By the driver itself, without
        Python's lock, and with an event that is there: where the launch queue is full the question waits in the driver."""
        driver, context, event, stream = self._driver, self._context, self._launched, ctypes.c_void_p(self._updates_on.cuda_stream)

        def is_done() -> bool:
            status = driver.cuCtxSetCurrent(context) or driver.cuEventRecord(event, stream)
            deadline = time.monotonic() + within_s
            while not status and driver.cuEventQuery(event) == _NOT_READY:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
            return True  # or the context is gone, and nothing is waited for any more

        return not self._answered("busy", is_done, within_s=1.5 * within_s)

    def answers(self, parameter: Any, *, within_s: float) -> bool:
        """Whether another thread of this process can still read from the device."""

        def reads() -> bool:
            to_host(parameter.detach().reshape(-1)[:1])
            return True

        return self._answered("reads", reads, within_s=within_s)

    def _answered(self, question: str, work: Callable[[], bool], *, within_s: float) -> bool:
        """What a thread of its own finds; no, where it does not come back: the next that asks the same waits for that one."""
        answer = self._unanswered.pop(question, None)
        try:
            if answer is None or answer.done():
                answer = self._begun(work)
            return bool(answer.result(within_s))
        except TimeoutError:
            if answer is not None:
                self._unanswered[question] = answer
            return False


def to_host(value: Any, copied: Callable[[Any, Any], Any] = lambda copy, tensor: copy.copy_(tensor)) -> Any:
    """`value` with every tensor on a device copied to the host, strides kept so that no kernel is needed. Of a sharded one this rank's shard, no collective."""
    import torch

    if isinstance(value, torch.Tensor):
        if not value.is_cuda:
            return value
        if hasattr(value, "to_local"):  # `from_local` would bring it back to the mesh's device
            return type(value)(to_host(value.to_local(), copied), value._spec, requires_grad=False)
        return copied(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu"), value.detach())
    if isinstance(value, dict):
        return {key: to_host(item, copied) for key, item in value.items()}
    return type(value)(to_host(item, copied) for item in value) if type(value) in (list, tuple) else value


def _pinned() -> tuple[Any, int]:
    """The words in memory of this process, and where the device has them."""
    import torch

    page = torch.zeros(DEVICE_WORDS_BYTES // 4, dtype=torch.int32, device="cpu", pin_memory=True)
    words = (ctypes.c_int32 * page.numel()).from_address(page.data_ptr())
    words.page = page
    return words, int(page.data_ptr())


def _registered(driver: Any, shared: memoryview | None) -> tuple[Any, int] | None:
    """The same in memory that others see. None where there is none, or the driver does not take it: a file on a disk, an old kernel."""
    if shared is None or not hasattr(driver, "cuMemHostGetDevicePointer_v2"):
        return None
    words = (ctypes.c_int32 * (DEVICE_WORDS_BYTES // 4)).from_buffer(shared)
    page, place = divmod(ctypes.addressof(words), mmap.PAGESIZE)
    on_device, start = ctypes.c_uint64(), ctypes.c_void_p(page * mmap.PAGESIZE)
    if driver.cuMemHostRegister_v2(start, ctypes.c_size_t(mmap.PAGESIZE), _REGISTER):
        return None
    if driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_device), start, 0):
        return None
    return words, on_device.value + place


_gate: DeviceGate | None = None
_without = False


def of_this_process(parameter: Any, shared: memoryview | None) -> DeviceGate | None:
    """The gate, where the update's parameters are on a CUDA device, its words in `shared`. Raises what keeps it from being made, once."""
    global _gate, _without
    if _gate is None and not _without and parameter is not None and parameter.is_cuda:
        _without = True
        _gate = DeviceGate(parameter.device, shared)
    return _gate


def abort_groups(say: Callable[[str], None]) -> None:
    """Breaks every collective of this process, so that its training thread comes back. Only once nothing can be poisoned any more."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized():
        return

    def abort() -> None:
        try:
            module._abort_process_group()
        except Exception as error:  # noqa: BLE001  torch of another version; the rank is ended by its launcher then
            say(f"the process groups could not be aborted ({type(error).__name__}: {error})")

    thread = threading.Thread(target=abort, name="torch-watchdog-abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
