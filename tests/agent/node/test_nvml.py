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
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5, total=80),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetPowerUsage": 612_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetName": name,
        }

    def __getattr__(self, question: str) -> Any:
        def answer(*_: Any, version: int | None = None) -> Any:
            if question in self._silent or (version is not None and "newer forms" in self._silent):
                raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
            return SimpleNamespace(used=4, reserved=1, total=80) if version == self.nvmlMemory_v2 else self._answers[question]

        return answer


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


def test_names_in_bytes_are_read_too() -> None:
    (sample,) = Gpus(Library(name=b"NVIDIA A100"), ("card",)).samples()
    assert sample.name == "NVIDIA A100"
