"""Rules over NVML's samples: recorded streams of faults that nobody can cause on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from streams_made import Watch, block, sample

from torch_watchdog.knowledge import xid_codes
from torch_watchdog.rules.xid import exit_code_of


def watched(*samples: dict[str, Any], gpu: str = "GPU-0", repeat: int = 1) -> Watch:
    watch = Watch(codes=xid_codes())
    second = 0
    for more in samples:
        for _ in range(repeat):
            watch.second(block(5, second, gpu=gpu), gpus=[sample(second, **more)])
            second += 1
    return watch


def test_an_xid_is_told_once_with_its_meaning_its_owner_and_the_rank_on_that_gpu() -> None:
    watch = watched({}, {"xids": (79,)}, {}, {})
    assert watch.told == [("gpu_xid", 5, "fires")]
    sign = watch.found[0].sign
    assert sign.said.startswith("GPU 3 of node-1 (rank 5): Xid 79, GPU fell off the bus")
    assert (sign.severity, sign.gpu) == ("critical", {"index": 3, "uuid": "GPU-0", "pci": "", "name": "NVIDIA H100"})


def test_an_xid_that_nobody_knows_is_told_as_such() -> None:
    assert "which the catalogue does not know" in watched({}, {"xids": (999,)}).found[0].sign.said


def test_a_neighbours_gpu_is_a_neighbours_matter() -> None:
    watch = watched({}, {"xids": (79,), "ecc_uncorrected": 3, "lost": True}, gpu="GPU-other", repeat=10)
    assert watch.told == []


@pytest.mark.parametrize(
    ("xids", "code"),
    [
        ((31,), 65),
        ((43,), 65),
        ((48,), 75),
        ((79,), 75),
        ((43, 79), 75),
        ((74,), 75),
        ((45,), None),
        ((63,), None),
        ((999,), None),
        ((), None),
    ],
)
def test_who_is_to_blame_decides_the_exit_code(xids: tuple[int, ...], code: int | None) -> None:
    assert exit_code_of(xids, xid_codes()) == code


def test_the_catalogue_is_whole() -> None:
    codes = xid_codes()
    assert len(codes) > 60
    assert {code.owner for code in codes.values()} == {"application", "driver", "hardware", "fabric"}
    assert all(code.severity in ("info", "warning", "critical") and code.action and code.meaning for code in codes.values())


def test_memory_errors_since_the_job_began_are_told_and_older_ones_are_not() -> None:
    assert watched({"ecc_uncorrected": 7}, repeat=5).told == []
    watch = watched({"ecc_uncorrected": 7}, {"ecc_uncorrected": 8}, repeat=3)
    assert watch.told == [("gpu_ecc", 5, "fires")]
    assert "1 memory error could not be corrected" in watch.found[0].sign.said


@pytest.mark.parametrize(
    ("more", "severity"), [({"remap_failed": True}, "critical"), ({"remap_pending": True}, "warning"), ({"ecc_corrected": 5000}, "warning")]
)
def test_rows_that_are_replaced_and_many_corrected_errors_are_told(more: dict[str, Any], severity: str) -> None:
    watch = watched({}, more, repeat=3)
    assert [finding.sign.severity for finding in watch.found] == [severity]


def test_a_gpu_that_its_board_slows_down_is_told_once_it_has_held() -> None:
    hot = {"throttle_reasons": 0x40, "sm_clock_mhz": 1100, "temperature_c": 91}
    watch = watched({}, hot, repeat=60)
    assert watch.told == [("gpu_throttle", 5, "fires")]
    said = watch.found[0].sign.said
    assert "slowed down by heat (by the board): 1100 of 1980 MHz (limit 90 %) at 91 C, in " in said
    assert said.endswith(" samples (limit 50 %)")


def test_of_a_gpu_that_tells_of_its_heat_and_of_no_clock_no_clock_is_told() -> None:
    """An instance of a divided one, say: it had been "None of None MHz at None C"."""
    watch = watched({}, {"throttle_reasons": 0x40, "sm_clock_mhz": None, "max_sm_clock_mhz": None, "temperature_c": None}, repeat=60)
    assert "slowed down by heat (by the board), in " in watch.found[0].sign.said


def test_a_power_cap_or_a_moment_of_heat_is_how_gpus_run() -> None:
    assert watched({"throttle_reasons": 0x4, "sm_clock_mhz": 1200}, repeat=120).told == []
    assert watched({}, {"throttle_reasons": 0x20, "sm_clock_mhz": 1500}, {}, repeat=15).told == []


def test_links_that_repeat_what_they_send_are_told() -> None:
    watch = Watch()
    for second in range(40):
        watch.second(block(0, second, gpu="GPU-0"), gpus=[sample(second, pcie_replays=50 * second)])
    assert watch.told == [("gpu_link", 0, "fires")]


def test_a_gpu_that_the_driver_calls_lost_is_told() -> None:
    watch = watched({}, {"lost": True, "memory_used_bytes": 0, "memory_total_bytes": 0}, repeat=2)
    assert watch.told == [("gpu_lost", 5, "fires")]


def test_a_gpu_that_says_nothing_of_itself_is_no_sign() -> None:
    silent = dict.fromkeys(
        ("sm_clock_mhz", "throttle_reasons", "ecc_uncorrected", "ecc_corrected", "pcie_replays", "nvlink_errors", "temperature_c")
    )
    assert watched(silent, repeat=60).told == []


def test_the_catalogue_lies_beside_the_rules() -> None:
    import torch_watchdog.rules.xid as module

    assert (Path(module.__file__).parent / "knowledge" / "xid_codes.tsv").is_file()
