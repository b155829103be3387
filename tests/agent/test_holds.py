"""What a rank says of a bad batch that it cannot leave out: whose batch it is, once, on every way by which it may be met."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from part_of_a_rank import PartOfARank

from torch_watchdog_agent.contract.checked import Checked
from torch_watchdog_agent.errors import BadBatchError
from torch_watchdog_agent.gate import Gate
from torch_watchdog_agent.holds import Holds
from torch_watchdog_proto.messages import BatchFact, Commit, Noticed, Prepare, Refused, Violation

BAD = Violation(kind="batch.index_out_of_bounds", summary="too large", cause="It is.", fix="Mend it.", batch=BatchFact(key="labels"))
OF_AN_EVALUATION = "It is a batch of an evaluation, of dev."


class Meeting(PartOfARank):
    """A rank before its first gate, where no veto would be heeded."""

    def __init__(self, folder: Path, *, phase: str, policy: str) -> None:
        super().__init__(folder)
        self.config.policy, self.config.bundles, self.config.replay = policy, False, None
        self.gate = Gate(0, lambda generation, commit: (commit, True))
        self.gate.phase = phase  # type: ignore[assignment]
        self.dataset, self.scan, self.quarantined = "dev", None, list[Violation]()
        self.history = SimpleNamespace(note=lambda *_, **__: None)
        self.quarantine = SimpleNamespace(add=lambda violation, **_: self.quarantined.append(violation))
        self.holds = Holds(self)  # type: ignore[arg-type]

    def write_contract(self) -> None: ...

    def notice(self, violation: Violation) -> None:
        self.tell(Noticed(rank=0, step=self.loop.step, micro_step=self.loop.micro_step, violation=violation))


def met(rank: Meeting) -> None:
    assert rank.holds.met("batch", Checked(batch_id=1, violation=BAD)) == "batch"


def met_unread(rank: Meeting) -> None:
    rank.holds.hold_late(BAD)


def met_in_the_forward(rank: Meeting) -> None:
    if rank.holds.refused(BAD):
        raise BadBatchError(BAD)


WAYS = [met, met_unread, met_in_the_forward]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("phase", "told"), [("eval", f"It is. {OF_AN_EVALUATION}"), ("train", "It is.")])
def test_a_batch_of_an_evaluation_is_told_as_one(tmp_path: Path, way: Callable[[Meeting], None], phase: str, told: str) -> None:
    rank: Any = Meeting(tmp_path, phase=phase, policy="stop")
    with pytest.raises(BadBatchError):
        way(rank)
    (word,) = rank.told
    assert isinstance(word, Refused) and word.violation.cause == told
    assert [violation.cause for violation in rank.quarantined] == [told]


NO_GATE_YET = "no update of this loop has come to a gate yet that could leave it out"


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (met, NO_GATE_YET),
        (met_unread, NO_GATE_YET),
        (met_in_the_forward, "it was found inside its step, which cannot be left out any more"),
    ],
)
def test_a_batch_that_policy_skip_cannot_leave_out_says_why(tmp_path: Path, way: Callable[[Meeting], None], why: str) -> None:
    rank: Any = Meeting(tmp_path, phase="train", policy="skip")
    with pytest.raises(BadBatchError):
        way(rank)
    assert rank.told[0].violation.cause == f"It is. It could not be skipped: {why}."


@pytest.mark.parametrize("way", WAYS)
def test_what_is_only_observed_changes_nothing_and_is_said_once(tmp_path: Path, way: Callable[[Meeting], None]) -> None:
    rank = Meeting(tmp_path, phase="eval", policy="observe")
    way(rank)
    way(rank)
    assert [(type(word), word.violation.cause) for word in rank.told] == [(Noticed, f"It is. {OF_AN_EVALUATION}")] * 2
    assert len(rank.said) == 1 and not rank.quarantined


@pytest.mark.parametrize(("leave", "said"), [(False, ["step 5: too large: left out on every rank"]), (True, [])])
def test_a_step_is_said_to_be_left_out_only_where_the_training_goes_on_after_it(tmp_path: Path, leave: bool, said: list[str]) -> None:
    rank: Any = Meeting(tmp_path, phase="train", policy="skip")
    rank.config.hold_timeout_s = 5.0
    rank.guard = SimpleNamespace(ahead=0)
    rank.loop.step = 5
    rank.gate.judge(4)
    rank.gate.on_order(Prepare(generation=1, veto=5, timeout_s=5.0))
    decision = Commit(generation=1, veto=5, save=leave, leave=leave, exit_code=65, path="p", reason="too large", grace_s=5.0)
    rank.gate.on_order(decision)
    rank.holds.hold_late(BAD)
    assert rank.said == said
