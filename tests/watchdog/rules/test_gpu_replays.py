"""NVML's samples as H100s and H200s gave them (tests/gpu/results), played again with ranks on the cards: with Xids that were recorded, and with faults that
nobody can cause on purpose.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from streams_made import Watch, block, sample

from torch_watchdog.job.health import Health
from torch_watchdog.knowledge import xid_codes
from torch_watchdog_proto.messages import GpuSample, StepTable

RECORDED = sorted((Path(__file__).parents[2] / "gpu" / "results").glob("nvml-*.json"))
LOADS = [load for path in RECORDED for load in json.loads(path.read_text())["loads"]]
CODES = xid_codes()
KNOWN = {field.name for field in dataclasses.fields(GpuSample)}


def samples_of(load: dict[str, Any], second: int, **fault: Any) -> list[GpuSample]:
    """Both cards of the recording; `fault` is of the one that bears the load."""
    made = []
    for recorded in load["samples"]:
        more = {name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items() if name in KNOWN}
        more |= {"time_ns": second * 10**9} | (fault if recorded["uuid"] == load["bears the load"] else {})
        made.append(GpuSample(**more))
    return made


def played(load: dict[str, Any], *faults: dict[str, Any], gpu: str, repeat: int) -> Watch:
    """Rank 0 computes on `gpu`, by the name that CUDA gives it."""
    watch = Watch(codes=CODES)
    for second in range(len(faults) * repeat):
        watch.second(block(0, second, gpu=gpu), gpus=samples_of(load, second, **faults[second // repeat]))
    return watch


def ids(load: dict[str, Any]) -> str:
    return str(load["CUDA_VISIBLE_DEVICES"])[:12]


def test_the_newest_recording_answers_every_question_of_a_sample_and_agrees_with_nvidia_smi() -> None:
    """The first one was made before most questions were asked, and counted what the driver keeps for itself as used."""
    newest = max((json.loads(path.read_text()) for path in RECORDED), key=lambda one: one["machine"]["date"])
    assert newest["agrees with nvidia-smi"] and newest["every load on the right card"]
    for load in newest["loads"]:
        for recorded in load["samples"]:
            assert recorded.keys() == KNOWN
            assert [name for name, value in recorded.items() if value is None or value == ""] == []


@pytest.mark.parametrize("load", LOADS, ids=ids)
def test_a_card_under_load_as_it_was_recorded_is_no_finding(load: dict[str, Any]) -> None:
    assert played(load, {}, gpu=load["bears the load"], repeat=120).told == []


XIDS = [
    (path.name, event, recorded["samples around them"])
    for path in sorted(RECORDED[0].parent.glob("faults-*.json"))
    for recorded in [json.loads(path.read_text())]
    if recorded["samples around them"]  # none where the clock ended the suite
    for event in recorded["xids"]
]


@pytest.mark.parametrize(("name", "event", "samples"), XIDS, ids=[f"{name}-{event['during'][0]}" for name, event, _ in XIDS])
@pytest.mark.parametrize("rank_is_on", ["it", "the other card"])
def test_an_xid_as_the_driver_gave_it_after_a_real_assertion_is_told_of_the_rank_on_that_card_alone(
    name: str, event: dict[str, Any], samples: list[dict[str, Any]], rank_is_on: str
) -> None:
    """What the node process asked NVML each second, before and after: the card is idle by then, or its memory is another's already."""
    near = [one for one in samples if abs(one["time_ns"] - event["time_ns"]) < 4 * 10**9]
    other = next(one["uuid"] for one in near if one["uuid"] != event["uuid"])
    watch = Watch(codes=CODES)
    for second, recorded in enumerate(near):
        seen = GpuSample(**{key: tuple(value) if isinstance(value, list) else value for key, value in recorded.items()})
        watch.second(block(5, second, gpu=event["uuid"] if rank_is_on == "it" else other), gpus=[seen])
    if rank_is_on == "the other card":
        assert watch.told == []
        return
    assert watch.told == [("gpu_xid", 5, "fires")]
    sign = watch.found[0].sign
    assert sign.gpu is not None and (sign.gpu["uuid"], sign.gpu["pci"]) == (event["uuid"], event["pci"])
    assert sign.said.startswith(f"GPU {event['index']} of node-1 (rank 5): Xid {event['code']}, ")
    assert sign.evidence == {"xid": [{"code": event["code"], "time_ns": event["time_ns"]}]}


HOT = {"throttle_reasons": 0x40, "sm_clock_mhz": 1100, "max_sm_clock_mhz": 1980}
BEFORE = {"ecc_uncorrected": 2, "ecc_corrected": 10, "throttle_reasons": 0x4, "sm_clock_mhz": 1900, "max_sm_clock_mhz": 1980}
FAULTS = [
    ("gpu_ecc", {**BEFORE, "ecc_uncorrected": 3}),
    ("gpu_ecc", {**BEFORE, "remap_failed": True}),
    ("gpu_ecc", {**BEFORE, "remap_pending": True, "remapped_rows": 1}),
    ("gpu_throttle", {**BEFORE, **HOT}),
    ("gpu_xid", {**BEFORE, "xids": (79,)}),
    ("gpu_lost", {"lost": True, "memory_used_bytes": 0, "memory_total_bytes": 0}),
]


@pytest.mark.parametrize("load", LOADS, ids=ids)
@pytest.mark.parametrize(("rule", "fault"), FAULTS, ids=[f"{rule}-{number}" for number, (rule, _) in enumerate(FAULTS)])
def test_a_fault_is_told_of_the_card_that_the_rank_is_on_whatever_made_it_visible(
    load: dict[str, Any], rule: str, fault: dict[str, Any]
) -> None:
    """`CUDA_VISIBLE_DEVICES` by number, turned round, and by UUID: the rank's device 0 is another card of the node each time."""
    watch = played(load, BEFORE, fault, gpu=load["bears the load"], repeat=60)
    assert {one[:2] for one in watch.told} == {(rule, 0)}
    (index,) = (one["index"] for one in load["samples"] if one["uuid"] == load["bears the load"])
    assert watch.found[0].sign.gpu == {**watch.found[0].sign.gpu, "index": index, "uuid": load["bears the load"]}  # type: ignore[dict-item]
    assert watch.found[0].sign.said.startswith(f"GPU {index} of node-1 (rank 0)")


@pytest.mark.parametrize("load", LOADS, ids=ids)
@pytest.mark.parametrize(("rule", "fault"), FAULTS, ids=[f"{rule}-{number}" for number, (rule, _) in enumerate(FAULTS)])
def test_a_fault_of_a_card_that_no_rank_is_on_is_no_finding(load: dict[str, Any], rule: str, fault: dict[str, Any]) -> None:
    (other,) = (one["uuid"] for one in load["samples"] if one["uuid"] != load["bears the load"])
    assert played(load, BEFORE, fault, gpu=other, repeat=60).told == []


def test_in_a_container_that_has_one_card_its_number_there_does_not_matter() -> None:
    """The container calls it 0, the node 3: the name is the same."""
    watch = Watch(codes=CODES)
    for second in range(4):
        inside = sample(second, index=0, uuid="GPU-d", xids=(48,) if second == 2 else ())
        watch.second(block(6, second, gpu="GPU-d"), gpus=[inside])
    assert watch.told == [("gpu_xid", 6, "fires")]
    assert watch.found[0].sign.gpu == {**(watch.found[0].sign.gpu or {}), "index": 0, "uuid": "GPU-d"}


def test_a_rank_on_one_instance_of_a_divided_card_hears_of_its_instance_only() -> None:
    """NVML calls it MIG-..., CUDA in the rank GPU-...; Xids of other instances are left out where samples are taken."""
    watch = Watch(codes=CODES)
    for second in range(4):
        parts = [sample(second, uuid=f"MIG-{part}", xids=(31,) if part == "b" and second == 2 else ()) for part in "ab"]
        watch.second(block(0, second, gpu="GPU-a"), block(1, second, gpu="GPU-b"), gpus=parts)
    assert watch.told == [("gpu_xid", 1, "fires")]


def expected_exit(code: int) -> int | None:
    entry = CODES[code]
    if entry.owner in ("hardware", "fabric"):
        return 75 if entry.severity == "critical" else None
    return 65 if entry.owner == "application" and entry.severity != "info" else None


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_xid_is_told_with_its_meaning_and_decides_the_exit_code_by_its_owner(code: int) -> None:
    health = Health(codes=CODES, changes={})
    for second, xids in enumerate(((), (code,), ())):
        health.take_steps(StepTable.of((block(4, second, gpu="GPU-0"),)), float(second))
        health.take_gpu("node-1", sample(second, xids=xids), float(second))
        found = health.findings(float(second), at_end=False)
        if second == 1:
            (finding,) = found
            assert finding.sign.said.startswith(f"GPU 3 of node-1 (rank 4): Xid {code}, {CODES[code].name}")
            assert finding.sign.severity == CODES[code].severity
    assert health.exit_code == expected_exit(code)


def test_of_an_application_error_and_the_hardware_fault_that_caused_it_the_hardware_decides() -> None:
    health = Health(codes=CODES, changes={})
    health.take_steps(StepTable.of((block(4, 0, gpu="GPU-0"),)), 0.0)
    health.take_gpu("node-1", sample(0, xids=(43, 13, 79)), 0.0)
    assert [finding.sign.severity for finding in health.findings(0.0, at_end=True)] == ["warning", "warning", "critical"]
    assert health.exit_code == 75


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"ecc_uncorrected": 1}, 75),
        ({"remap_failed": True}, 75),
        ({"lost": True, "memory_used_bytes": 0, "memory_total_bytes": 0}, 75),
        ({"remap_pending": True}, None),
        ({"ecc_corrected": 5000}, None),
        (HOT, None),
        ({"ecc_uncorrected": 1, "xids": (43,)}, 75),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_a_job_that_fails_after_its_gpu_lost_data_or_itself_is_not_told_that_its_program_is_wrong(
    fault: dict[str, Any], code: int | None
) -> None:
    """The driver need not give an Xid for it to everybody: the page on what to do about gpu.ecc had said 75, and the command's own code came."""
    health = Health(codes=CODES, changes={})
    for second in range(60):
        health.take_steps(StepTable.of((block(4, second, gpu="GPU-0"),)), float(second))
        health.take_gpu("node-1", sample(second, **(fault if second else {})), float(second))
        health.findings(float(second), at_end=False)
    assert health.exit_code == code
