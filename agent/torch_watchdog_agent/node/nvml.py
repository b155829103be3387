"""What NVML says of this node's GPUs.

Owns the library's handles. A node without the library, the driver or a GPU is no error: it has no samples. One question that a card does not answer
leaves that field None.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from torch_watchdog_proto.messages import GpuSample

__all__ = ["Gpus"]


class Gpus:
    """Every GPU of the node. Blocks for as long as the driver does: to be asked off the event loop."""

    def __init__(self, library: Any, handles: tuple[Any, ...]) -> None:
        self._library, self._handles = library, handles

    @classmethod
    def open(cls) -> Self | None:
        """None where there is nothing to ask."""
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = tuple(pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount()))
        except Exception:  # noqa: BLE001 - no library, no driver, another user's container: whatever it is, there are no samples
            return None
        return cls(pynvml, handles) if handles else None

    def samples(self) -> tuple[GpuSample, ...]:
        """One per GPU that answers."""
        found = (self._sample(index, handle) for index, handle in enumerate(self._handles))
        return tuple(sample for sample in found if sample is not None)

    def close(self) -> None:
        with suppress(Exception):
            self._library.nvmlShutdown()

    def _sample(self, index: int, handle: Any) -> GpuSample | None:
        ask = self._library
        memory = self._memory(handle)
        if memory is None:
            return None  # a card that does not even know its memory has fallen off the bus
        power_mw = _answer(lambda: ask.nvmlDeviceGetPowerUsage(handle))
        utilisation = _answer(lambda: ask.nvmlDeviceGetUtilizationRates(handle))
        return GpuSample(
            time_ns=time.time_ns(), index=index, uuid=_text(_answer(lambda: ask.nvmlDeviceGetUUID(handle))),
            name=_text(_answer(lambda: ask.nvmlDeviceGetName(handle))), memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total), utilisation_percent=None if utilisation is None else int(utilisation.gpu),
            temperature_c=_answer(lambda: ask.nvmlDeviceGetTemperature(handle, ask.NVML_TEMPERATURE_GPU)),
            power_w=None if power_mw is None else power_mw / 1000,
        )  # fmt: skip

    def _memory(self, handle: Any) -> Any:
        """As nvidia-smi has it: the older form of the answer counts what the driver keeps for itself (half a GiB of an H100) as used."""
        ask = self._library
        newer = _answer(lambda: ask.nvmlDeviceGetMemoryInfo(handle, version=ask.nvmlMemory_v2))
        return newer if newer is not None else _answer(lambda: ask.nvmlDeviceGetMemoryInfo(handle))


def _answer(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # noqa: BLE001 - NVMLError_NotSupported on this card, or a card that is gone
        return None


def _text(value: Any) -> str:
    """Older versions of the library give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
