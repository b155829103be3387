"""Trainings that call their model in other ways than a plain step: the bounds are learned all the same, and nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from guard_loop import Loop
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from torch_watchdog_agent.contract import declared
from torch_watchdog_agent.contract.table import unmet_bounds

Batch: TypeAlias = dict[str, torch.Tensor]
Step: TypeAlias = Callable[[nn.Module, Batch], None]
WORDS, CLASSES = 50, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.inner(x + self.positions(torch.arange(x.shape[1]))), 0.1)


class Net(nn.Module):
    """Tokens to classes; `how` its block is called. The head for words is tied to the table."""

    def __init__(self, how: Callable[..., torch.Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.table, self.block, self.head, self.words = (
            nn.Embedding(WORDS, 8),
            Block(),
            nn.Linear(8, CLASSES),
            nn.Linear(8, WORDS, bias=False),
        )
        self.words.weight = self.table.weight
        self.how = how

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.how(self.block, self.table(ids))
        return self.head(x.mean(1)), self.words(x)


def batch(length: int = 6) -> Batch:
    return {"ids": torch.randint(0, WORDS, (4, length)), "y": torch.randint(0, CLASSES, (4,))}


def step(model: nn.Module, batch: Batch) -> None:
    classes, words = model(batch["ids"])
    (F.cross_entropy(classes, batch["y"]) + F.cross_entropy(words[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())).backward()


def under_autocast(model: nn.Module, batch: Batch) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(model, batch)


def by_hand(use_reentrant: bool) -> Callable[..., torch.Tensor]:
    return lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "plain, with a tied head": (Net, step),
    "checkpointed": (lambda: Net(by_hand(False)), step),
    "checkpointed by a backward of its own": (lambda: Net(by_hand(True)), step),
    "under autocast": (Net, under_autocast),
}


def trained(make: Callable[[], nn.Module], run: Step, *, guarded: bool) -> tuple[list[torch.Tensor], torch.Tensor, Loop | None]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(model, run, optimizer) if guarded else None
    for number in range(8):
        made = batch(6 + number % 3)
        if loop is not None:
            seen = loop.step(made, go_on=False)
            assert seen.violation is None
        else:
            run(model, made)
            optimizer.step()
            optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()], torch.get_rng_state(), loop


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_learned_and_trains_bit_identically(name: str) -> None:
    make, run = PROGRAMS[name]
    plain, rng, _ = trained(make, run, guarded=False)
    guarded, guarded_rng, loop = trained(make, run, guarded=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, guarded, strict=True))
    assert torch.equal(rng, guarded_rng)
    assert loop is not None and loop.said == []
    for key, place, value, module in (("ids", (1, 2), WORDS, "table"), ("y", (3,), CLASSES, None), ("y", (0,), -1, None)):
        bad = batch()
        bad[key][place] = value
        found = loop.step(bad).checked.violation
        assert found is not None and found.bound is not None
        assert (found.batch.key, found.batch.element, found.batch.value, found.bound.module) == (key, place, value, module)
    assert loop.step(batch()).violation is None


def test_embeddings_that_are_resized_in_the_run_have_their_new_bound() -> None:
    _, _, loop = trained(Net, step, guarded=True)
    assert loop is not None
    bad = batch()
    bad["ids"][0, 0] = WORDS + 2
    assert loop.step(copy.deepcopy(bad)).checked.violation is not None
    net = loop.model
    assert isinstance(net, Net)
    with torch.no_grad():
        larger = nn.Embedding(WORDS + 10, 8)
        larger.weight[:WORDS] = net.table.weight
    net.table, net.words.weight = larger, larger.weight
    assert loop.step(bad, go_on=False).violation is None
    for _ in range(4):
        assert loop.step(batch(), go_on=False).violation is None
    worse = batch()
    worse["ids"][0, 0] = WORDS + 10
    found = loop.step(worse).violation
    assert found is not None and found.bound is not None
    assert (found.batch.value, found.bound.high) == (WORDS + 10, WORDS + 9)


def test_an_adapter_is_looked_through() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    adapter = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapter)
    loop = Loop(model, lambda model, batch: model(**batch).loss.backward())

    def words(length: int) -> Batch:
        ids = torch.randint(0, 64, (2, length))
        return {"input_ids": ids, "labels": ids.clone()}

    assert [one.violation for one in loop.train([words(8 + n % 3) for n in range(6)])] == [None] * 6
    bad = words(8)
    bad["input_ids"][0, 3] = 66
    found = loop.step(bad).checked.violation
    assert found is not None and found.bound is not None
    assert (found.batch.element, found.bound.high, found.bound.op) == ((0, 3), 63, "embedding")


def test_two_models_that_train_in_turns_and_a_teacher_that_does_not_are_learned_each() -> None:
    """Generator and discriminator look at the same batch, each with a table of its own; the teacher's is the smallest."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"maker": nn.Embedding(WORDS, 8), "judge": nn.Embedding(40, 8), "teacher": nn.Embedding(30, 8)})
    models["teacher"].eval().requires_grad_(False)

    def turn(models: nn.Module, batch: Batch) -> None:
        made = models["maker"](batch["ids"])
        models["judge"](batch["real"]).sub(made.detach()).square().sum().backward()
        with torch.no_grad():
            told = models["teacher"](batch["hints"])
        made.sub(told).square().sum().backward()

    def draw() -> Batch:
        return {"ids": torch.randint(0, WORDS, (4, 6)), "real": torch.randint(0, 40, (4, 6)), "hints": torch.randint(0, 30, (4, 6))}

    loop = Loop(models, turn)
    assert [one.violation for one in loop.train([draw() for _ in range(8)])] == [None] * 8
    for key, rows in (("ids", WORDS), ("real", 40), ("hints", 30)):
        bad = draw()
        bad[key][1, 1] = rows
        found = loop.step(bad).checked.violation
        assert found is not None and found.bound is not None
        assert (found.batch.key, found.batch.element, found.bound.high) == (key, (1, 1), rows - 1)


def test_bounds_of_the_settings_hold_from_the_first_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_rules", {})
    declared.take_settings({"y": {"low": 1, "high": 3, "ignored": -1}, "ids": {"high": 20}})
    loop = Loop(Net(), step)
    legal = {"ids": torch.randint(0, 21, (4, 6)), "y": torch.tensor([1, 3, 2, -1])}
    assert loop.guard.fetched(legal, indices=None, worker=None).violation is None
    for key, place, value in (("ids", (2, 2), 21), ("y", (1,), 0), ("y", (1,), 4)):
        bad = {name: tensor.clone() for name, tensor in legal.items()}
        bad[key][place] = value
        found = loop.guard.fetched(bad, indices=None, worker=None).violation
        assert found is not None and found.bound is not None
        assert (found.batch.key, found.batch.value, found.bound.learned_from) == (key, value, "declared by you")


@pytest.mark.parametrize("name", ["0.ids", "batch[0].ids"])
def test_a_bound_may_be_declared_by_the_path_and_by_what_people_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_rules", {})
    declared.take_settings({"batch[0].ids": {"high": 5}})
    declared.take_settings({"0.ids": {"high": 6}})
    declared.take_settings({name: {"high": 3}})  # the last word, in whichever spelling
    loop = Loop(Net(), lambda model, batch: step(model, {"ids": batch[0]["ids"], "y": batch[1]}))
    legal = ({"ids": torch.randint(0, 4, (4, 6))}, torch.tensor([1, 3, 2, 1]))
    loop.train([legal] * 4)
    bad = legal[0]["ids"].clone()
    bad[2, 2] = 4
    found = loop.guard.fetched(({"ids": bad}, legal[1]), indices=None, worker=None).violation
    assert found is not None and (found.batch.key, found.summary) == ("0.ids", "batch[0].ids[2,2] = 4, allowed 0..3 as declared")
    contract: Any = loop.guard.contract()
    assert unmet_bounds(contract) == []
    assert [(row["key"], row["bound"]["high"]) for row in contract["guarded"] if row["op"] == "declared"] == [("0.ids", 3)]


def test_a_broken_declaration_is_told_as_one_and_one_that_no_batch_meets_is_not_called_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_rules", {})
    declared.take_settings({"y": {"low": 1, "high": 3}, "lables": {"high": 3}})
    loop = Loop(Net(), step)
    legal = {"ids": torch.randint(0, 10, (4, 6)), "y": torch.tensor([1, 3, 2, 1])}
    loop.train([legal] * 4)
    found = loop.guard.fetched(legal | {"y": torch.tensor([1, 0, 2, 1])}, indices=None, worker=None).violation
    assert found is not None and found.summary == "y[1] = 0, allowed 1..3 as declared"
    assert "1..3 was declared for it in [bounds] in watchdog.toml" in found.cause and "table" not in found.cause + found.fix
    contract: Any = loop.guard.contract()
    assert "lables" not in {row["key"] for row in contract["guarded"]}
    assert ("lables", "no traced batch has a tensor of this name: they have ids, y") in {
        (row["key"], row["why"]) for row in contract["opaque"]
    }
    assert unmet_bounds(contract) == [
        "the bound that [bounds] in watchdog.toml declares for lables holds for nothing so far: "
        "no traced batch has a tensor of this name: they have ids, y"
    ]
