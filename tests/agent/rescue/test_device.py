"""What the CUDA driver answers to the gate, as far as that needs no device."""

from __future__ import annotations

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
