"""Random corruption of the batches of model families: a slice of it, and the committed table of all. The rest: `python tests/sweep/differential.py`."""

from __future__ import annotations

import json

import differential
import pytest


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "LayoutLMv3ForTokenClassification", "two_towers"])
def test_a_slice_of_random_corruption_is_told_where_the_step_fails_and_nowhere_else(name: str) -> None:
    found = differential.result_of(name, rounds=25, clean=30)
    assert (found["alarms"], found["blamed"], found["missed"]) == ([], [], [])
    assert found["harmful"] + found["harmless"] + found["undecided"] == 25
    assert found["held"]


def test_the_committed_table_is_the_one_of_the_committed_results_and_keeps_the_promise() -> None:
    document = json.loads((differential.HERE / "differential.json").read_text())
    total = document["summary"]
    assert total == differential.summary(document["results"])
    assert (differential.HERE / "DIFFERENTIAL.md").read_text() == differential.table(document)
    assert total["families"] >= 20
    assert (total["alarms"], total["blamed"], total["differ"]) == (0, 0, 0)
    assert len({one["commit"] for one in document["results"]}) == 1, "one state of the code"
    assert differential.caught_share(total) >= differential.MIN_CAUGHT
    assert min(one["clean"] for one in document["results"]) >= 200
