"""The sweep on a few classes of different kinds, and on all of them: clean batches silent, bad ones named where the step would fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest

SAMPLE = (
    "BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "LongformerForTokenClassification", "M2M100ForConditionalGeneration",
    "ViTForImageClassification", "SEWForCTC",
)  # fmt: skip
CAUGHT = {"held", "refused", "named"}


def swept(names: list[str], jobs: int) -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}
    models.swept(names, jobs=jobs, known=known, keep=lambda known: None)
    return known


def unexplained(results: dict[str, dict[str, Any]]) -> list[str]:
    """Misses and alarms that no line of models.EXPLAINED accounts for."""
    ran = [result for result in results.values() if result["status"] == "swept"]
    missed = [
        f"{r['class']}: {probe}: {r[probe]}" for r in ran for probe in models.PROBES if r[probe]["outcome"] in ("missed", "false alarm")
    ]
    loud = [f"{r['class']}: {r['alarms']} {r['said']}" for r in ran if r["alarms"] or r["said"]]
    return loud + [line for line in missed if not models.explanation(line)]


@pytest.mark.timeout(600)
def test_a_sample_of_the_model_classes_is_guarded() -> None:
    results = swept(list(SAMPLE), jobs=1)
    assert {name: result["why"] for name, result in results.items() if result["status"] != "swept"} == {}
    assert unexplained(results) == []
    assert all(results[name]["id"]["outcome"] in CAUGHT for name in SAMPLE if name not in ("ViTForImageClassification", "SEWForCTC"))
    assert all(results[name]["label"]["outcome"] in CAUGHT for name in SAMPLE)
    assert {results[name]["position"]["outcome"] for name in ("BertForMaskedLM", "GPT2LMHeadModel")} <= CAUGHT
    assert results["M2M100ForConditionalGeneration"]["position"]["outcome"] == "harmless"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_model_class_that_can_be_built_is_guarded() -> None:
    results = swept(models.class_names(), jobs=2)
    assert sum(result["status"] == "swept" for result in results.values()) >= 300
    assert unexplained(results) == []


def test_the_committed_table_is_the_one_of_the_committed_results() -> None:
    here = Path(models.__file__).parent
    document = json.loads((here / "results.json").read_text())
    assert document["summary"] == models.summary(document["results"])
    assert (here / "RESULTS.md").read_text() == models.table(document)
    assert unexplained({result["class"]: result for result in document["results"]}) == []
