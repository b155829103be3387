"""The demo succeeds only when everything happened as it must."""

from __future__ import annotations

from typing import Any

import pytest

from torch_watchdog.demonstration import BAD_SAMPLE, BAD_TOKEN, ROWS, SCRIPT, judge

GOOD: dict[str, Any] = {
    "kind": "batch.index_out_of_range",
    "batch": {"value": BAD_TOKEN, "sample": {"dataset_index": BAD_SAMPLE}},
    "bound": {"low": 0, "high": ROWS - 1},
    "action": {"prevented": True, "ranks_stopped": [1, 0], "checkpoint": {"path": "x", "committed": True, "finite": True}},
}


def unmet(exit_code: int, incidents: list[dict[str, Any]]) -> list[str]:
    return [expectation.text for expectation in judge(exit_code, incidents) if not expectation.met]


def test_the_right_story_meets_every_expectation() -> None:
    assert unmet(65, [GOOD]) == []


@pytest.mark.parametrize(
    ("exit_code", "change", "text"),
    [
        (1, {}, "exit code 65"),
        (65, {"action": GOOD["action"] | {"prevented": False}}, "never ran"),
        (65, {"action": GOOD["action"] | {"ranks_stopped": [1]}}, "both ranks"),
        (65, {"action": GOOD["action"] | {"checkpoint": {"committed": False, "finite": True}}}, "committed"),
        (65, {"batch": {"value": BAD_TOKEN, "sample": {"dataset_index": 1}}}, "sample"),
        (65, {"bound": {"high": ROWS}}, "rows of the table"),
    ],
)
def test_each_thing_that_went_otherwise_is_named(exit_code: int, change: dict[str, Any], text: str) -> None:
    (named,) = unmet(exit_code, [GOOD | change])
    assert text in named


def test_without_an_incident_nothing_is_taken_for_granted() -> None:
    assert len(unmet(0, [])) == len(judge(0, []))


def test_the_script_holds_what_the_demo_expects() -> None:
    text = SCRIPT.read_text()
    assert f"BAD_SAMPLE, BAD_TOKEN = {BAD_SAMPLE}, {BAD_TOKEN}" in text
    assert f"VOCABULARY, CLASSES, LENGTH = {ROWS}," in text
