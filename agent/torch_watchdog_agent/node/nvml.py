"""What NVML says of this node's GPUs.

Owns the library's handles, and the driver's events (Xid) since the last look. A node without the library, the driver or a GPU is no error: it has no
samples. One question that a card does not answer leaves that field None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from torch_watchdog_proto.messages import GpuSample

__all__ = ["Gpus"]

_GPU_IS_LOST = 15  # NVML_ERROR_GPU_IS_LOST
_MOST_EVENTS = 64  # at one look
_NO_INSTANCE = 0xFFFFFFFF  # of an event that is the whole card's
_MOST_LINKS = 18
# Replays and recoveries: bad checksums alone are mended on the way, and a healthy H200 counts dozens of them a second.
_LINK_COUNTERS = (0, 1)


@dataclass(frozen=True, slots=True)
class _Card:
    """A GPU, or one instance of a GPU that is divided (MIG): then `whole` is the GPU, of which health is asked, and `instance` its number there."""

    index: int
    handle: Any
    uuid: str
    whole: Any
    whole_uuid: str
    instance: int | None = None

    def is_meant(self, event_instance: int) -> bool:
        return self.instance is None or event_instance in (self.instance, _NO_INSTANCE)


class Gpus:
    """Every GPU of the node, and every instance of one that is divided. Blocks for as long as the driver does: to be asked off the event loop."""

    def __init__(self, library: Any, handles: tuple[Any, ...]) -> None:
        self._library = library
        self._cards = tuple(card for index, handle in enumerate(handles) for card in _cards(library, index, handle))
        self._xids = XidEvents(library, handles)

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
        events = self._xids.since_last()
        found = (self._sample(card, _codes(card, events.get(card.whole_uuid, ()))) for card in self._cards)
        return tuple(sample for sample in found if sample is not None)

    def close(self) -> None:
        self._xids.close()
        with suppress(Exception):
            self._library.nvmlShutdown()

    def _sample(self, card: _Card, xids: tuple[int, ...]) -> GpuSample | None:
        ask, handle, whole = self._library, card.handle, card.whole
        memory = self._memory(handle)
        if memory is None:  # a card that does not even know its memory: it does not answer for a moment, or has fallen off the bus
            return _lost(card, xids) if self._is_lost(handle) else None
        power_mw = _answer(lambda: ask.nvmlDeviceGetPowerUsage(whole))
        utilisation = _answer(lambda: ask.nvmlDeviceGetUtilizationRates(handle))
        return GpuSample(
            time_ns=time.time_ns(), index=card.index, uuid=card.uuid,
            name=_text(_answer(lambda: ask.nvmlDeviceGetName(handle))), memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.used + memory.free), utilisation_percent=None if utilisation is None else int(utilisation.gpu),
            temperature_c=_answer(lambda: ask.nvmlDeviceGetTemperature(whole, ask.NVML_TEMPERATURE_GPU)),
            power_w=None if power_mw is None else power_mw / 1000, xids=xids, **_health(ask, whole),
        )  # fmt: skip

    def _is_lost(self, handle: Any) -> bool:
        try:
            self._library.nvmlDeviceGetMemoryInfo(handle)
        except Exception as error:  # noqa: BLE001 - whatever it says, only one word means lost
            return getattr(error, "value", None) == _GPU_IS_LOST
        return False

    def _memory(self, handle: Any) -> Any:
        """As nvidia-smi has it: the older form of the answer counts what the driver keeps for itself (half a GiB of an H100) as used.

        In the newer form that is neither used nor free, but part of the total: used and free together are all that programs can have.
        """
        ask = self._library
        newer = _answer(lambda: ask.nvmlDeviceGetMemoryInfo(handle, version=ask.nvmlMemory_v2))
        return newer if newer is not None else _answer(lambda: ask.nvmlDeviceGetMemoryInfo(handle))


class XidEvents:
    """The driver's events of these cards, taken without waiting. Where it gives none (a container without the right, an old driver), there are none."""

    def __init__(self, library: Any, handles: tuple[Any, ...]) -> None:
        self._library = library
        self._set = _answer(library.nvmlEventSetCreate)
        for handle in handles if self._set is not None else ():
            _answer(lambda handle=handle: library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, self._set))  # type: ignore[misc]

    def since_last(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By the card's UUID: each code, and the instance that it is of."""
        found: dict[str, tuple[tuple[int, int], ...]] = {}
        for _ in range(_MOST_EVENTS if self._set is not None else 0):
            event = _answer(lambda: self._library.nvmlEventSetWait_v2(self._set, 0))
            if event is None:
                break  # none has come
            uuid = _text(_answer(lambda: self._library.nvmlDeviceGetUUID(event.device)))  # noqa: B023 - asked at once
            found[uuid] = (*found.get(uuid, ()), (int(event.eventData), int(event.gpuInstanceId)))
        return found

    def close(self) -> None:
        if self._set is not None:
            _answer(lambda: self._library.nvmlEventSetFree(self._set))


def _cards(library: Any, index: int, handle: Any) -> Iterator[_Card]:
    """The GPU itself, then its instances, where it is divided."""
    uuid = _text(_answer(lambda: library.nvmlDeviceGetUUID(handle)))
    yield _Card(index, handle, uuid, handle, uuid)
    for number in range(_answer(lambda: int(library.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0):
        part = _answer(lambda: library.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))  # noqa: B023 - asked at once
        if part is not None:
            part_uuid = _text(_answer(lambda: library.nvmlDeviceGetUUID(part)))  # noqa: B023 - asked at once
            instance = _answer(lambda: int(library.nvmlDeviceGetGpuInstanceId(part)))  # noqa: B023 - asked at once
            yield _Card(index, part, part_uuid, handle, uuid, _NO_INSTANCE if instance is None else instance)


def _codes(card: _Card, events: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(code for code, instance in events if card.is_meant(instance))


def _lost(card: _Card, xids: tuple[int, ...]) -> GpuSample:
    return GpuSample(
        time_ns=time.time_ns(), index=card.index, uuid=card.uuid, name="", memory_used_bytes=0, memory_total_bytes=0, xids=xids, lost=True
    )


def _health(ask: Any, handle: Any) -> dict[str, Any]:
    """What tells of a card that is failing, or is slowed down."""
    rows = _answer(lambda: ask.nvmlDeviceGetRemappedRows(handle))  # corrected, not corrected, pending, failed
    pci = _answer(lambda: ask.nvmlDeviceGetPciInfo(handle))
    limit_mw = _answer(lambda: ask.nvmlDeviceGetEnforcedPowerLimit(handle))
    return {
        "pci": "" if pci is None else _text(pci.busId),
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "sm_clock_mhz": _answer(lambda: int(ask.nvmlDeviceGetClockInfo(handle, ask.NVML_CLOCK_SM))),
        "max_sm_clock_mhz": _answer(lambda: int(ask.nvmlDeviceGetMaxClockInfo(handle, ask.NVML_CLOCK_SM))),
        "throttle_reasons": _answer(lambda: int(ask.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
        "ecc_uncorrected": _ecc(ask, handle, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
        "ecc_corrected": _ecc(ask, handle, "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
        "remapped_rows": None if rows is None else int(rows[1]),
        "remap_pending": rows is not None and bool(rows[2]),
        "remap_failed": rows is not None and bool(rows[3]),
        "pcie_replays": _answer(lambda: int(ask.nvmlDeviceGetPcieReplayCounter(handle))),
        "nvlink_errors": _nvlink_errors(ask, handle),
    }


def _ecc(ask: Any, handle: Any, kind: str) -> int | None:
    return _answer(lambda: int(ask.nvmlDeviceGetTotalEccErrors(handle, getattr(ask, kind), ask.NVML_VOLATILE_ECC)))  # type: ignore[no-any-return]


def _nvlink_errors(ask: Any, handle: Any) -> int | None:
    """Of all links that are up; None where the card has none."""
    total = None
    for link in range(_MOST_LINKS):
        if not _answer(lambda: ask.nvmlDeviceGetNvLinkState(handle, link)):  # noqa: B023 - asked at once
            continue
        for counter in _LINK_COUNTERS:
            count = _answer(lambda: int(ask.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)))  # noqa: B023 - asked at once
            total = total if count is None else (total or 0) + count
    return total


def _answer(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # noqa: BLE001 - NVMLError_NotSupported on this card, or a card that is gone
        return None


def _text(value: Any) -> str:
    """Older versions of the library give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
