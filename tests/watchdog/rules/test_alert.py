"""The life of an alert, moved by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_watchdog.rules.alert import Alert


def test_a_sign_fires_once_it_has_held() -> None:
    alert = Alert(hold_s=10, keep_s=5)
    assert [alert.step(True, now) for now in (0, 5, 9.9, 10, 11)] == [None, None, None, "fires", None]


def test_a_sign_that_goes_away_before_it_has_held_tells_nobody() -> None:
    alert = Alert(hold_s=10, keep_s=0)
    changes = [alert.step(present, now) for present, now in ((True, 0), (False, 5), (True, 6), (True, 15), (True, 16))]
    assert changes == [None, None, None, None, "fires"]


def test_an_alert_is_over_once_its_sign_was_away_for_long_enough() -> None:
    alert = Alert(hold_s=0, keep_s=5)
    changes = [alert.step(present, now) for present, now in ((True, 0), (False, 1), (True, 4), (False, 6), (False, 10), (False, 11))]
    assert changes == ["fires", None, None, None, None, "resolves"]
    assert alert.state == "resolved"


def test_an_alert_that_was_over_fires_again_after_holding_again() -> None:
    alert = Alert(hold_s=2, keep_s=0)
    for now in (0, 2):
        alert.step(True, now)
    assert alert.step(False, 3) == "resolves"
    assert [alert.step(True, now) for now in (4, 5, 6)] == [None, None, "fires"]
    assert alert.fired == 2


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 20)), max_size=60), st.floats(0, 10), st.floats(0, 10))
def test_firing_and_resolving_always_alternate(looks: list[tuple[bool, float]], hold_s: float, keep_s: float) -> None:
    alert, now, changes = Alert(hold_s=hold_s, keep_s=keep_s), 1.0, []
    for present, passed in looks:
        now += passed
        changes += [change] if (change := alert.step(present, now)) else []
    assert changes == [("fires", "resolves")[number % 2] for number in range(len(changes))]
