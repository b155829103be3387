"""What is learned is the same whatever order a set has: each process of a launch has hashes of its own, and all ranks must judge alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e  # scripts with torch in processes of their own

LEARN = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from corruption import seeded, spoiled, taught
from guard_zoo import FAMILIES
from torch_watchdog_agent.contract.recipe import sizes_of
from torch_watchdog_agent.contract.sizes import Size

def readings(size):
    return sorted(map(str, size.readings)) if isinstance(size, Size) else size

learned = {}
for name in sys.argv[1:]:
    loop, seen = taught(FAMILIES[name](), 12)
    family = seeded(FAMILIES[name](), 7)
    told = [loop.step(spoiled(family)) for _ in range(25)]
    rules = [[readings(rule.rows), *map(readings, sizes_of(rule.recipe))] for rule in loop.guard._contract.rules.values()]
    traced = [one.checked.needs_trace for one in seen + told]
    learned[name] = [loop.guard.contract(), rules, traced, [one.violation and one.violation.summary for one in told]]
print(json.dumps(learned))
"""
FAMILIES = ("one_hot_and_gather", "two_towers", "labels_made_in_the_loop", "columns_and_active_labels", "bart", "layoutlmv3")


def learned_with(seed: int) -> dict[str, object]:
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", LEARN, *FAMILIES]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_two_processes_with_other_hashes_learn_the_same_and_say_the_same() -> None:
    one, other = learned_with(1), learned_with(2)
    assert one == other
    assert all(len(rules) > 2 and any(told) for _, rules, _, told in one.values())
