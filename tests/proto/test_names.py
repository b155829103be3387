"""A tensor's path as people are told it."""

from __future__ import annotations

import pytest

from torch_watchdog_proto.names import spoken


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("input_ids", "input_ids"), ("batch", "batch"), ("0", "batch[0]"), ("0.targets", "batch[0].targets"), ("1.0.ids", "batch[1][0].ids"),
        ("images.2", "images[2]"), ("a.b", "a.b"), ("", ""),
    ],
)  # fmt: skip
def test_places_in_tuples_and_lists_stand_in_brackets(key: str, said: str) -> None:
    assert spoken(key) == said
