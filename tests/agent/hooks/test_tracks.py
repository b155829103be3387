"""Which pass over which loader a training follows."""

from __future__ import annotations

import pytest

from torch_watchdog_agent.hooks.tracks import Stand, follow, turned_from


@pytest.mark.parametrize(
    ("is_over", "is_used", "turned"),
    [(True, False, True), (True, True, False), (False, False, False)],  # the last: two loaders in turn, of which the second is followed
)
def test_only_a_pass_that_is_over_and_unused_was_no_training(is_over: bool, is_used: bool, turned: bool) -> None:
    looked_at = Stand(is_over=is_over, is_used=is_used)
    assert not turned_from(None)
    follow(looked_at)
    assert not turned_from(looked_at)
    follow(Stand())
    assert turned_from(looked_at) is turned
