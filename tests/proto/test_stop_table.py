"""The transition table of the stop protocol, and the diagram that is made of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parent))
from stop_diagram import README, drawn, parts

from torch_watchdog_proto.stop.table import TABLE, State, Trigger


def test_the_diagram_in_the_readme_is_that_of_the_table() -> None:
    assert parts(README.read_text())[1] == drawn(), "run `make diagram`"


def test_every_state_is_entered_and_left_and_every_trigger_has_a_row() -> None:
    rows = TABLE.values()
    assert {row.next for row in rows if row.next != row.state} == set(get_args(State))
    assert {row.state for row in rows if row.next != row.state} == set(get_args(State))
    assert {row.trigger for row in rows} == set(get_args(Trigger))


def test_every_state_in_which_an_order_is_under_way_ends_by_its_deadline() -> None:
    for state in set(get_args(State)) - {"idle"}:
        assert TABLE[state, "deadline"].next == "idle"
