"""The decision register: the first word stands, whoever asks later finds it, and a store that is gone keeps nobody waiting for long."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from torch_watchdog_agent.register import DecisionRegister
from torch_watchdog_proto.messages import Commit

COMMIT = Commit(generation=1, veto=4, reason="ids[1] = 70, naïve")


def registers(count: int, attempt: int = 0) -> tuple[TCPStore, list[DecisionRegister]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return store, [DecisionRegister(environment, attempt=attempt, world_size=2, say=pytest.fail) for _ in range(count)]


def test_the_first_word_stands_for_everybody() -> None:
    _store, (here, there) = registers(2)
    assert here.decide(1, COMMIT) == (COMMIT, True)
    assert there.decide(1, None) == (COMMIT, True)
    assert there.decide(2, None) == (None, True)
    assert here.decide(2, COMMIT) == (None, True)


def test_attempts_have_registers_of_their_own() -> None:
    store, (here,) = registers(1)
    here.decide(1, COMMIT)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    assert DecisionRegister(environment, attempt=1, world_size=2, say=pytest.fail).decide(1, None) == (None, True)


def test_a_single_rank_needs_no_store() -> None:
    register = DecisionRegister({}, attempt=0, world_size=1, say=pytest.fail)
    assert register.decide(1, COMMIT) == (COMMIT, True)
    assert register.decide(1, None) == (COMMIT, True)


def test_without_a_store_there_is_no_decision_and_one_sentence() -> None:
    said: list[str] = []
    register = DecisionRegister({}, attempt=0, world_size=2, say=said.append)
    assert register.decide(1, COMMIT) == (None, False)
    assert len(said) == 1
    assert "goes on without a decision" in said[0]
