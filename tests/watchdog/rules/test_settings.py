"""Thresholds that people set: what would end the rules, or make one tell everything or nothing, is refused; all else they bear."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from streams_made import GIB, Watch, block, labels, sample

from torch_watchdog.knowledge import xid_codes
from torch_watchdog.rules.catalogue import check_settings, rules_with
from torch_watchdog.rules.limits import LIMITS

MUCH = 10**6
RULES = rules_with({})


def edges_of(settings: type[Any]) -> list[tuple[str, Any]]:
    """The least and the most that each number may be."""
    found = []
    for one in fields(settings):
        if not isinstance(one.default, bool):
            least, most = one.metadata.get("least", 0), one.metadata.get("most", math.inf)
            found += [(one.name, type(one.default)(edge)) for edge in (least, MUCH if math.isinf(most) else most)]
    return found


def everything(watch: Watch) -> Watch:
    """A run in which there is something for every rule to look at: 110 steps, from the 40th on bad."""
    for step in range(110):
        bad, blocks = step >= 40, []
        for rank in range(3):
            allocated = (20 + (step if rank else 0) // 2) * GIB
            blocks.append(block(
                rank, step, loss=1.0 + 0.01 * (step % 7) + 20 * (bad and rank == 1), own_ms=60 if bad and rank == 2 else 20,
                loader_ms=15 if bad and rank == 0 else 1, scale=(65536.0 / 2 ** max(0, step - 60),), reach=(0.3 + 0.006 * step,), gpu=f"GPU-{rank}",
                tensors=(labels(5.0 * step, ignored=98 if bad else 20, bound=560),), tokens=530, allocated_bytes=(allocated,),
                reserved_bytes=(allocated + 30 * GIB,), peak_bytes=(allocated,), alloc_retries=(step,),
            ))  # fmt: skip
        hurt: dict[str, Any] = {
            "throttle_reasons": 0x40, "sm_clock_mhz": 1000, "ecc_uncorrected": 1, "ecc_corrected": 50 * step, "pcie_replays": 50 * step,
            "nvlink_errors": 50 * step, "xids": (79,), "memory_used_bytes": 78 * GIB,
        }  # fmt: skip
        watch.second(*blocks, gpus=[sample(step, uuid=f"GPU-{rank}", **(hurt if bad else {})) for rank in range(3)])
    return watch


def test_in_that_run_nearly_every_rule_finds_something() -> None:
    told = {name for name, _, _ in everything(Watch(codes=xid_codes(), ids_creep={"enabled": True}, straggler={"hold_s": 5.0})).told}
    assert told >= {rule.about.name for rule in RULES} - {"gpu_lost", "slow_loader"}


@pytest.mark.parametrize(
    ("name", "setting", "value"), [(rule.about.name, setting, value) for rule in RULES for setting, value in edges_of(rule.settings)]
)
def test_the_least_and_the_most_that_is_taken_is_borne(name: str, setting: str, value: float) -> None:
    """`loss_spike.steps = 40` was taken, and ended all rules of the job in its first minute."""
    changes = {name: {"enabled": True, setting: value}}
    check_settings(changes)
    everything(Watch(codes=xid_codes(), **changes))


OUTSIDE = [
    ("loss_spike", "steps", 0, "from 1 to 32"),
    ("loss_spike", "steps", 33, "from 1 to 32"),
    ("scaler_collapse", "fall", 0, "at least 2"),
    ("straggler", "ratio", 0.5, "at least 1"),
    ("straggler", "share", 20, "from 0 to 1"),
    ("supervision", "share", 5, "from 0 to 1"),
    ("ids_creep", "steady", 95, "from 0 to 1"),
    ("memory_pressure", "retries", 0, "at least 1"),
    ("gpu_throttle", "of_samples", 50, "from 0.02 to 1"),
    ("gpu_ecc", "corrected", 0, "at least 1"),
    ("hang", "shortest_s", 1, "at least 5"),
    ("hang", "of_timeout", 1.5, "from 0.1 to 1"),
]


@pytest.mark.parametrize(("name", "setting", "value", "words"), OUTSIDE)
def test_what_is_outside_is_refused_with_what_was_expected(name: str, setting: str, value: float, words: str) -> None:
    with pytest.raises(ValueError, match=f"{name} {setting} must be {words}, not {value}"):
        check_settings({name: {setting: value}})


@pytest.mark.parametrize("settings", [*(rule.settings for rule in RULES), *LIMITS.values()])
def test_every_number_is_by_default_within_what_may_be_set(settings: type[Any]) -> None:
    for one in fields(settings):
        assert one.metadata.get("least", 0) <= one.default <= one.metadata.get("most", math.inf)
