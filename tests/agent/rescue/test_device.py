"""What the CUDA driver answers to the gate, as far as that needs no device."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest

from torch_watchdog_agent.rescue.device import DeviceGate


@pytest.mark.parametrize("status", [700, 710, 719])
def test_a_device_that_is_lost_is_no_refusal(status: int) -> None:
    """Seen on two H200s: the assertion came to light in a call of ours, the gate was given up for it, and with it how far the device had come."""
    object.__new__(DeviceGate)._check(status)


@pytest.mark.parametrize("status", [1, 801])
def test_a_driver_that_lacks_the_calls_is_said_to_refuse_them(status: int) -> None:
    with pytest.raises(RuntimeError, match=f"refuses stream memory operations .error {status}."):
        object.__new__(DeviceGate)._check(status)


class Driver:
    """Its launch queue is full until `room` is set; what was launched is done once `done` is."""

    def __init__(self) -> None:
        self.room, self.done, self.asked = threading.Event(), threading.Event(), 0

    def cuCtxSetCurrent(self, context: object) -> int:
        return 0

    def cuEventRecord(self, event: object, stream: object) -> int:
        self.asked += 1
        self.room.wait(20)
        return 0

    def cuEventQuery(self, event: object) -> int:
        return 0 if self.done.is_set() else 600


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def gate(driver: Driver) -> DeviceGate:
    """As one that was made, but for the device."""
    gate = object.__new__(DeviceGate)
    parts = {"_driver": driver, "_context": None, "_launched": ctypes.c_void_p(), "_unanswered": {}, "_device": -1, "_beside": None}
    vars(gate).update(parts, _updates_on=SimpleNamespace(cuda_stream=0))
    return gate


def test_a_device_whose_launch_queue_is_full_is_busy_and_a_look_does_not_wait_for_it_nor_ask_twice(
    gate: DeviceGate, driver: Driver
) -> None:
    """Seen on an H200: each look left a thread behind in the driver, and its answer came when nobody waited for it any more."""
    assert [gate.is_busy(within_s=0.02) for _ in range(3)] == [True, True, True]
    assert driver.asked == 1
    driver.done.set()
    driver.room.set()
    assert not gate._unanswered["busy"].exception(20)
    assert not gate.is_busy(within_s=5.0)
    assert driver.asked in (1, 2)


def test_a_device_that_has_done_what_was_launched_is_not_busy(gate: DeviceGate, driver: Driver) -> None:
    driver.room.set()
    assert gate.is_busy(within_s=0.02)
    driver.done.set()
    assert not gate.is_busy(within_s=5.0)
    assert gate._unanswered == {}
