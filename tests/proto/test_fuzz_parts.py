"""What the fuzzer calls, called with what it begins with and with random bytes: a part that no longer fits its subject would find nothing."""

from __future__ import annotations

import fuzz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_watchdog_proto import record


@pytest.mark.parametrize("part", fuzz.PARTS)
def test_the_fuzzers_parts_take_their_seeds(part: str) -> None:
    for seed in fuzz.seeds():
        fuzz.PARTS[part](seed)


@pytest.mark.parametrize("part", fuzz.PARTS)
@given(data=st.binary(max_size=900))
@settings(max_examples=300, deadline=None)
def test_the_fuzzers_parts_meet_no_error_in_random_bytes(part: str, data: bytes) -> None:
    fuzz.PARTS[part](data)


def test_a_slot_that_the_fuzzer_fills_is_one_that_the_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its bytes would end at the checksum, and reach nothing behind it."""
    reached: list[int] = []
    unpack = record._unpack
    monkeypatch.setattr(record, "_unpack", lambda kind, payload: (reached.append(kind), unpack(kind, payload))[1])
    fuzz.ring(bytes([3]) + bytes(199) + bytes([5]) + bytes(10))
    assert reached[:2] == [3, 5]
