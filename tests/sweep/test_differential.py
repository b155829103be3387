"""Random corruption of the batches of model families: a slice of it. All of it: `python tests/sweep/differential.py`."""

from __future__ import annotations

import differential
import pytest


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "LayoutLMv3ForTokenClassification", "two_towers"])
def test_a_slice_of_random_corruption_is_told_where_the_step_fails_and_nowhere_else(name: str) -> None:
    found = differential.result_of(name, rounds=25, clean=30)
    assert (found["alarms"], found["blamed"], found["missed"]) == ([], [], [])
    assert found["harmful"] + found["harmless"] + found["undecided"] == 25
    assert found["held"]
