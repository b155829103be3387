"""What NVML says: samples where there are GPUs, and nothing at all where there are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch_watchdog_agent.node.nvml import Gpus
from torch_watchdog_proto import codec
from torch_watchdog_proto.messages import NodeReport


class Library:
    """Stands in for pynvml; a question in `silent` is one that the card does not answer."""

    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 2  # noqa: N815  NVML's own name

    def __init__(self, *silent: str, name: Any = "NVIDIA H100") -> None:
        self._silent = silent
        self._answers: dict[str, Any] = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5, free=75, total=80),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetPowerUsage": 612_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetName": name,
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:1B:00.0"),
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40,
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
            "nvmlDeviceGetPcieReplayCounter": 7,
            "nvmlDeviceGetNvLinkState": 1,
            "nvmlDeviceGetNvLinkErrorCounter": lambda _card, _link, counter: (1, 1, 1000, 1000)[counter],
            "nvmlEventSetCreate": object(),
            "nvmlDeviceRegisterEvents": None,
            "nvmlEventSetFree": None,
            "nvmlDeviceGetMaxMigDeviceCount": 0,
        }
        self.events: list[Any] = []
        self.errors: dict[str, Exception] = {}

    def __getattr__(self, question: str) -> Any:
        def answer(*_: Any, version: int | None = None) -> Any:
            if question in self._silent or (version is not None and "newer forms" in self._silent):
                raise self.errors.get(question, RuntimeError("NVML_ERROR_NOT_SUPPORTED"))
            if question == "nvmlEventSetWait_v2":
                return self.events.pop(0)  # IndexError: the timeout of NVML's own
            known = SimpleNamespace(used=4, free=75, reserved=1, total=80) if version == self.nvmlMemory_v2 else self._answers[question]
            return known(*_) if callable(known) else known

        return answer


def event(code: int, *, instance: int = 0xFFFFFFFF) -> Any:
    return SimpleNamespace(eventData=code, device="card", gpuInstanceId=instance)


class DividedLibrary(Library):
    """A card in three instances of a seventh each, the second of which was taken away."""

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if index == 1:
            raise RuntimeError("NVML_ERROR_NOT_FOUND")
        return f"part-{index}"

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return "GPU-1" if handle == "card" else f"MIG-{handle}"

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        return {"part-0": 7, "part-2": 9}[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        return SimpleNamespace(used=5, free=75, total=80) if handle == "card" else SimpleNamespace(used=2, free=8, total=10)

    def nvmlDeviceGetTemperature(self, handle: Any, *_: Any) -> int:
        if handle != "card":
            raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
        return 61


def test_each_instance_of_a_divided_card_has_its_own_memory_and_the_cards_health() -> None:
    whole, first, third = Gpus(DividedLibrary(), ("card",)).samples()
    assert [(one.uuid, one.index, one.memory_total_bytes) for one in (whole, first, third)] == [
        ("GPU-1", 0, 80),
        ("MIG-part-0", 0, 10),
        ("MIG-part-2", 0, 10),
    ]
    assert (first.temperature_c, first.ecc_uncorrected, first.throttle_reasons) == (61, 2, 0x40)


def test_an_xid_of_one_instance_is_not_told_of_the_others_and_one_of_the_card_is_told_of_all() -> None:
    library = DividedLibrary()
    gpus = Gpus(library, ("card",))
    library.events = [event(31, instance=9), event(79)]
    assert [one.xids for one in gpus.samples()] == [(31, 79), (79,), (31, 79)]


def test_every_card_gives_a_sample_that_passes_the_wire() -> None:
    samples = Gpus(Library(), ("first", "second")).samples()
    assert [(sample.index, sample.utilisation_percent, sample.power_w, sample.temperature_c) for sample in samples] == [
        (0, 97, 612.5, 61),
        (1, 97, 612.5, 61),
    ]
    codec.node_message(NodeReport(seq=1, time_ns=0, gpus=samples))


def test_what_a_card_does_not_say_is_none() -> None:
    (sample,) = Gpus(Library("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetName"), ("card",)).samples()
    assert (sample.power_w, sample.utilisation_percent, sample.name, sample.uuid) == (None, None, "", "GPU-1")


def test_a_card_that_is_gone_gives_no_sample() -> None:
    assert Gpus(Library("nvmlDeviceGetMemoryInfo"), ("card",)).samples() == ()


def test_memory_that_the_driver_keeps_for_itself_is_not_used_and_an_old_library_is_asked_the_old_way() -> None:
    ((new,), (old,)) = (Gpus(Library(*silent), ("card",)).samples() for silent in ((), ("newer forms",)))
    assert (new.memory_used_bytes, old.memory_used_bytes) == (4, 5)
    assert (new.memory_total_bytes, old.memory_total_bytes) == (
        79,
        80,
    )  # what programs can have: a forecast of the full card was 0.6 GiB late on an H200


def test_names_in_bytes_are_read_too() -> None:
    (sample,) = Gpus(Library(name=b"NVIDIA A100"), ("card",)).samples()
    assert sample.name == "NVIDIA A100"


class GpuIsLost(Exception):  # noqa: N818  what it stands for
    value = 15


def test_what_tells_of_a_failing_card_is_in_its_sample() -> None:
    (sample,) = Gpus(Library(), ("card",)).samples()
    assert (sample.pci, sample.power_limit_w, sample.sm_clock_mhz, sample.max_sm_clock_mhz) == ("00000000:1B:00.0", 700.0, 1755, 1980)
    assert (sample.throttle_reasons, sample.ecc_uncorrected, sample.pcie_replays, sample.nvlink_errors) == (
        0x40,
        2,
        7,
        36,
    )  # 18 links; mended checksums count for nothing
    assert (sample.remapped_rows, sample.remap_pending, sample.remap_failed) == (1, True, False)


def test_a_card_that_knows_nothing_of_its_health_gives_its_sample_all_the_same() -> None:
    silent = [
        "nvmlDeviceGetPciInfo", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetNvLinkState", "nvmlEventSetCreate",
    ]  # fmt: skip
    (sample,) = Gpus(Library(*silent), ("card",)).samples()
    assert (sample.pci, sample.ecc_uncorrected, sample.remap_failed, sample.nvlink_errors, sample.xids) == ("", None, False, None, ())


def test_an_xid_is_told_once_by_the_card_that_it_came_from() -> None:
    library = Library()
    gpus = Gpus(library, ("card",))
    library.events = [event(79), event(45)]
    assert [sample.xids for sample in gpus.samples()] == [(79, 45)]
    assert [sample.xids for sample in gpus.samples()] == [()]


def test_a_card_that_the_driver_calls_lost_says_so_with_its_name_from_before() -> None:
    library = Library()
    gpus = Gpus(library, ("card",))
    library._silent = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID")
    library.errors = {"nvmlDeviceGetMemoryInfo": GpuIsLost()}
    (sample,) = gpus.samples()
    assert (sample.lost, sample.uuid) == (True, "GPU-1")
    codec.node_message(NodeReport(seq=1, time_ns=0, gpus=(sample,)))
