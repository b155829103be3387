"""Batches that are on a device when the guard gets them: the same diagnosis as on the CPU, nothing bad reaches an operator, and nothing is waited for."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import guard_zoo_counts  # noqa: F401  its families join the others
import pytest
import torch
from guard_device_loop import DeviceLoop
from guard_loop import Loop
from guard_zoo import FAMILIES
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torch_watchdog_agent.contract.flatten import leaves_of

LIKE_ON_THE_CPU = ["bert_classifier", "gpt2", "bart", "roberta", "layoutlmv3", "two_towers", "segmentation"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def step(model: nn.Module, batch: Any) -> None:
    logits = model(batch["x"])
    F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["y"][:, 1:].flatten()).backward()


def clean() -> dict[str, torch.Tensor]:
    batch = {"x": torch.randint(0, 50, (4, 6)), "y": torch.randint(0, 5, (4, 6)), "image": torch.rand(4, 3)}
    batch["y"][:, 4] = -100
    return batch


def looks_at_images(model: nn.Module, batch: Any) -> None:
    step(model, batch)
    (model.head.weight[:, :3].sum() * batch["image"]).sum().backward()


def learned(run: Any = step, **options: Any) -> DeviceLoop:
    torch.manual_seed(0)
    loop = DeviceLoop(Net(), run, **options)
    assert [loop.step(clean(), go_on=False).violation for _ in range(6)] == [None] * 6
    assert loop.said == []
    return loop


@pytest.mark.parametrize("name", LIKE_ON_THE_CPU)
def test_every_bad_batch_of_a_family_is_told_in_the_words_of_the_cpu_and_never_breaks_an_operator(name: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    family = FAMILIES[name]()
    device, cpu = DeviceLoop(family.model, family.step), Loop(copy.deepcopy(family.model), family.step)
    for _ in range(40):
        batch = family.clean()
        assert device.step(copy.deepcopy(batch), go_on=False).violation is None
        cpu.step(batch)
    for bad in family.bad:
        batch = bad.change(family.clean())
        found, expected = device.step(copy.deepcopy(batch)), cpu.step(batch).violation
        assert found.violation == expected, (name, bad.key)
        assert found.raised is None or found.checked.needs_trace, (name, bad.key, found.raised)
    assert device.said == []


def test_a_rule_that_a_device_cannot_check_is_named_in_the_contract_with_the_reason() -> None:
    torch.manual_seed(0)
    random.seed(0)
    family = FAMILIES["placeholders_put"]()
    loop = DeviceLoop(family.model, family.step)
    for _ in range(10):
        loop.step(family.clean(), go_on=False)
    (row,) = [row for row in loop.guard.contract()["opaque"] if row["op"] == "index_put"]
    assert row["why"] == "on a device only in traced steps: it is no range of values"


def test_labels_picked_by_a_mask_are_left_to_traced_steps_and_no_later_batch_is_read_for_them() -> None:
    def picked(model: nn.Module, batch: Any) -> None:
        chosen = batch["y"][batch["x"] > 9]
        F.cross_entropy(model(batch["x"])[batch["x"] > 9], chosen).backward()

    loop = learned(picked)
    whys = {row["why"] for row in loop.guard.contract()["opaque"] if row["op"] == "cross_entropy" and row["kind"] == "range"}
    assert whys == {"on a device only in traced steps: its sizes depend on what the batch holds"}
    checked = loop.guard.fetched(clean(), indices=None, worker=None)
    assert not checked.needs_trace
    assert checked.elsewhere == {"x", "y", "image"}


def test_a_clean_batch_keeps_its_bits_its_types_and_its_layout() -> None:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor
        name: str

        def __getitem__(self, key: str) -> torch.Tensor:
            return getattr(self, key)

    torch.manual_seed(0)
    loop = DeviceLoop(Net(), step)
    for _ in range(6):
        one = clean()
        batch = Batch(one["x"].t().contiguous().t(), one["y"], "n")
        batch.x.note = "mine"  # type: ignore[attr-defined]
        loop.step(batch, go_on=False)
    got = loop.handed
    assert type(got) is Batch
    assert (got.name, got.x.note) == ("n", "mine")  # type: ignore[union-attr]
    assert got.x is not batch.x  # nobody can know in time that nothing was wrong with it
    assert torch.equal(got.x, batch.x)
    assert torch.equal(got.y, batch.y)
    assert got.x.stride() == batch.x.stride()
    assert got.x.data_ptr() != batch.x.data_ptr()


def test_the_bad_cells_are_legal_in_what_the_model_gets_and_untouched_in_the_batch() -> None:
    loop = learned()
    bad = clean()
    bad["x"][1, 2], bad["y"][2, 3], bad["y"][0, 0] = 50, -7, 999  # the first label of a row reaches no loss
    kept = copy.deepcopy(bad)
    found = loop.step(bad)
    assert found.raised is None
    assert found.diagnosed is not None
    assert (found.diagnosed.batch.key, found.diagnosed.batch.element, found.diagnosed.batch.value) == ("x", (1, 2), 50)
    assert all(torch.equal(bad[key], kept[key]) for key in bad)
    changed = {key: (leaves_of(loop.handed)[key] != bad[key]).nonzero().tolist() for key in bad}
    assert changed == {"x": [[1, 2]], "y": [[2, 3]], "image": []}


def test_labels_that_are_left_out_stay_what_they_are_and_a_batch_of_nothing_else_is_named() -> None:
    loop = learned()
    batch = clean()
    batch["y"][:, 1:] = -100
    found = loop.step(batch)
    assert found.diagnosed is not None
    assert found.diagnosed.kind == "batch.empty"
    assert torch.equal(loop.handed["y"], batch["y"])


def test_the_sample_is_named() -> None:
    loop = learned()
    bad = clean()
    bad["x"][3, 0] = -1
    found = loop.step(bad, indices=[11, 12, 13, 14]).diagnosed
    assert found is not None
    assert found.batch.sample is not None
    assert found.batch.sample.dataset_index == 14


def test_nan_in_an_input_is_named_once_it_has_reached_the_model_and_forgotten_where_the_training_lives_with_it() -> None:
    loop = learned(looks_at_images)
    bad = clean()
    bad["image"][2, 1] = float("nan")
    found = loop.step(bad).diagnosed
    assert found is not None
    assert (found.kind, found.batch.key, found.batch.element) == ("batch.not_finite", "image", (2, 1))


def test_where_nothing_may_be_changed_the_loop_gets_its_own_batch_and_the_finding_comes_all_the_same() -> None:
    loop = learned(change=False)
    bad = clean()
    bad["y"][0, 2] = 5
    found = loop.step(bad)
    assert loop.handed is bad
    assert isinstance(found.raised, IndexError)
    assert found.diagnosed is not None


def test_a_container_that_cannot_be_made_again_is_said_once_and_its_bad_values_are_still_named() -> None:
    class Own(tuple):
        __slots__ = ()

        def __new__(cls, x: torch.Tensor, y: torch.Tensor) -> Own:
            return super().__new__(cls, (x, y))

        def __getitem__(self, key: Any) -> Any:
            return tuple(self)["xy".index(key)]

    torch.manual_seed(0)
    loop = DeviceLoop(Net(), step)
    for _ in range(8):
        one = clean()
        loop.step(Own(one["x"], one["y"]), go_on=False)
    assert type(loop.handed) is Own
    assert len(loop.said) == 1
    assert "Own cannot be copied" in loop.said[0]
    bad = clean()
    bad["x"][0, 0] = 50
    assert loop.step(Own(bad["x"], bad["y"])).diagnosed is not None


def test_a_batch_of_a_known_kind_is_waited_for_only_where_the_answer_is_asked() -> None:
    loop = learned()
    before = len(loop.waits)
    batch = clean()
    checked = loop.guard.fetched(batch, indices=None, worker=None)
    _, under_check = loop.guard.started(checked, batch, change=True)
    assert under_check is not None
    assert len(loop.waits) == before
    assert not under_check.sent.arrived()
    under_check.sent.wait()
    assert under_check.sent.arrived()
    assert loop.guard.said_of(under_check) is None


def test_a_patient_guard_reads_every_batch() -> None:
    from torch_watchdog_agent.contract import Guard

    guard = Guard(say=print, on_refused=lambda _: None, patient=True, is_elsewhere=lambda _: True)
    batch = clean()
    checked = guard.fetched(batch, indices=None, worker=None)
    assert {stat.key: stat.high for stat in checked.stats}["x"] == float(batch["x"].max())
    assert checked.on_device.looks == []
