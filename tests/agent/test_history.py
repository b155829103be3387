"""What a rank records of its steps: seen through the ring, as a node process reads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_watchdog_agent.contract.check import TensorStat
from torch_watchdog_agent.gradients import Norm
from torch_watchdog_agent.history import History
from torch_watchdog_agent.loop import Loop
from torch_watchdog_agent.recorder import Recorder
from torch_watchdog_proto.record import GradientsSharded, KeyNamed, MicroStep, Record, RingReader, StepDone, TensorSeen


class Recorded:
    """One rank's history, its loop, and what its ring holds."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        recorder = Recorder(folder, rank=0, attempt=0, world_size=1, local_world_size=1)
        self.history, self._path = History(recorder, self.loop), recorder.path

    def batch(self, **legal: tuple[float, float]) -> None:
        self.loop.handed_over()
        stat = TensorStat(key="ids", dtype="int64", low=0, high=9, negatives=0, ignored=0, finite=True, shape=(2, 3))
        self.history.batch([stat], loader_ns=5, evaluation=False, legal=legal)

    def step(self, loss: float = 1.0) -> None:
        self.batch()
        self.history.loss_seen(torch.tensor(loss))
        self.history.step_done(self.loop.at_gate(1), vetoed=False)
        self.loop.gate_done(applied=True)
        self.history.flush()

    def read(self, kind: type[Record]) -> list[Record]:
        records, _ = RingReader(memoryview(self._path.read_bytes())).read()
        return [record for record in records if isinstance(record, kind)]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_a_norm_belongs_to_one_step_and_none_is_minus_one(recorded: Recorded) -> None:
    recorded.history.norm_seen(torch.tensor(2.5))
    recorded.step()
    recorded.step()
    assert [step.grad_norm for step in recorded.read(StepDone)] == [2.5, -1.0]


def test_a_norm_that_is_spread_over_ranks_is_left_alone(recorded: Recorded) -> None:
    recorded.history.norm_seen(SimpleNamespace(numel=lambda: 1, full_tensor=None))
    recorded.step()
    assert [step.grad_norm for step in recorded.read(StepDone)] == [-1.0]


def test_norms_made_on_request_for_several_optimizers_of_a_step_are_one(recorded: Recorded) -> None:
    recorded.history.norm_made(Norm(torch.tensor(3.0), is_of_shard=False))
    recorded.history.norm_made(Norm(torch.tensor(4.0), is_of_shard=False))
    recorded.history.norm_made(None)
    recorded.step()
    recorded.step()
    assert [step.grad_norm for step in recorded.read(StepDone)] == [5.0, -1.0]
    assert not recorded.read(GradientsSharded)


def test_that_norms_are_a_shards_is_told_at_once_and_not_with_each_step(recorded: Recorded) -> None:
    for _ in range(5):
        recorded.history.norm_made(Norm(torch.tensor(3.0), is_of_shard=True))
        recorded.step()
    assert len(recorded.read(GradientsSharded)) == 2  # and with step 0, as with every 4,096th: a ring forgets


def test_a_norm_that_the_loop_has_told_is_asked_for_once_and_one_that_cannot_be_read_is_none(recorded: Recorded) -> None:
    history = recorded.history
    history.norm_seen(torch.tensor(2.5))
    assert (history.has_been_told_norm(), history.has_been_told_norm()) == (True, False)
    history.norm_seen(SimpleNamespace(numel=lambda: 1, full_tensor=None))
    assert not history.has_been_told_norm()


def test_a_scale_stays_until_the_next(recorded: Recorded) -> None:
    recorded.step()
    recorded.history.scale_seen(torch.tensor(1024.0))
    recorded.step()
    recorded.step()
    assert [micro.scale for micro in recorded.read(MicroStep)] == [0.0, 1024.0, 1024.0]


def test_the_forward_of_a_batch_is_timed_and_that_of_one_fetched_ahead_is_not(recorded: Recorded) -> None:
    recorded.batch()
    recorded.batch()
    recorded.history.loss_seen(torch.tensor(1.0))
    recorded.history.loss_seen(torch.tensor(1.0))
    recorded.history.step_done(recorded.loop.at_gate(1), vetoed=False)
    first, second = (micro.forward_ns for micro in recorded.read(MicroStep))
    assert first > 0
    assert second == 0


def test_the_backward_of_a_step_is_timed_and_not_carried_over(recorded: Recorded) -> None:
    recorded.step()
    recorded.batch()
    recorded.history.step_done(recorded.loop.at_gate(1), vetoed=False)
    with_loss, without = (step.backward_ns for step in recorded.read(StepDone))
    assert with_loss > 0
    assert without == 0


def test_a_key_is_named_again_when_its_range_becomes_known(recorded: Recorded) -> None:
    recorded.batch()
    recorded.batch()
    recorded.batch(ids=(0.0, 63.0))
    recorded.batch(ids=(0.0, 63.0))
    assert [key.high for key in recorded.read(KeyNamed)] == [pytest.approx(float("nan"), nan_ok=True), 63.0]


def test_what_a_forward_waits_for_other_ranks_is_not_its_own_time(recorded: Recorded) -> None:
    recorded.batch()
    recorded.history.waited(5_000_000_000)
    recorded.history.loss_seen(torch.tensor(1.0))
    recorded.history.step_done(recorded.loop.at_gate(1), vetoed=False)
    (micro,), (step,) = recorded.read(MicroStep), recorded.read(StepDone)
    assert step.backward_ns >= 5_000_000_000
    assert micro.forward_ns < 5_000_000_000


def test_more_names_than_a_record_has_numbers_for_are_told_once_and_the_loop_goes_on(tmp_path: Path) -> None:
    """Batches whose keys are the samples' ids."""
    said: list[str] = []
    recorder = Recorder(tmp_path, rank=0, attempt=0, world_size=1, local_world_size=1, say=said.append)
    history = History(recorder, loop := Loop())
    loop.handed_over()
    stat = TensorStat(key="", dtype="int64", low=0, high=9, negatives=0, ignored=0, finite=True, shape=(2, 3))
    history.batch([stat._replace(key=f"sample-{number}") for number in range(65_538)], loader_ns=5, evaluation=False)
    assert len(said) == 1 and "'sample-65536'" in said[0]
    records, _ = RingReader(memoryview(recorder.path.read_bytes())).read(limit=1 << 20)
    assert max(record.key_id for record in records if isinstance(record, TensorSeen)) == 65_535
