"""A batch of NumPy arrays or lists, of which the loop makes tensors by itself, is guarded as one of tensors; one that is suddenly another is named."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from guard_loop import Loop
from named_models import MODELS
from torch import nn
from torch.nn import functional as F  # noqa: N812

Made = tuple[torch.Tensor, torch.Tensor]
ROWS, COLUMNS, VOCABULARY, CLASSES = 4, 6, 50, 5
BAD = (2, 3)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).mean(1))


@dataclass
class Record:
    ids: Any
    labels: Any


class Pair(NamedTuple):
    ids: Any
    labels: Any


class Batches:
    """Clean batches in one container and dtype, and the same with an id past the table."""

    def __init__(self, dtype: str, kind: Callable[..., Any], listed: bool) -> None:
        self.random, self.dtype, self.kind, self.listed = np.random.default_rng(0), dtype, kind, listed

    def __call__(self, bad: int | None = None) -> Any:
        ids = self.random.integers(0, VOCABULARY, (ROWS, COLUMNS))
        labels = self.random.integers(0, CLASSES, ROWS)
        if bad is not None:
            ids[BAD] = bad
        arrays = [ids.astype(self.dtype), labels.astype(self.dtype)]
        return self.kind(*([array.tolist() for array in arrays] if self.listed else arrays))


def as_dict(ids: Any, labels: Any) -> dict[str, Any]:
    return {"ids": ids, "labels": labels, "text": ["a"] * ROWS, "weight": np.float32(0.5), "nothing": None}


def each_of(make: Callable[[Any], torch.Tensor]) -> Callable[[Any], Made]:
    return lambda b: tuple([make(v) for k, v in b.items() if k in ("ids", "labels")])  # type: ignore[return-value]


def long_of(array: Any) -> torch.Tensor:
    return torch.as_tensor(array, dtype=torch.long)


def widened(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


CASES: dict[str, tuple[Callable[[Any], Made], str, Callable[..., Any], bool]] = {
    "as_tensor": (each_of(torch.as_tensor), "int64", as_dict, False),
    "from_numpy": (each_of(torch.from_numpy), "int64", as_dict, False),
    "tensor": (each_of(torch.tensor), "int64", as_dict, False),
    "int32": (each_of(long_of), "int32", as_dict, False),
    "uint16": (each_of(long_of), "uint16", as_dict, False),
    "uint16, widened": (each_of(widened), "uint16", as_dict, False),
    "float64": (each_of(lambda v: torch.tensor(v).long()), "float64", as_dict, False),
    "a dataclass": (lambda b: (torch.as_tensor(b.ids), torch.tensor(b.labels)), "int64", Record, False),
    "a named tuple": (lambda b: (torch.as_tensor(b.ids), torch.tensor(b.labels)), "int64", Pair, False),
    "a pair": (lambda b: (torch.from_numpy(b[0]), torch.from_numpy(b[1])), "int64", lambda *both: both, False),
    "cut short": (lambda b: (torch.as_tensor(b["ids"][:, :4]), torch.as_tensor(b["labels"])), "int64", as_dict, False),
    "row by row": (lambda b: (torch.stack([torch.as_tensor(r) for r in b["ids"]]), torch.tensor(b["labels"])), "int64", as_dict, False),
    "lists": (lambda b: (torch.tensor(b["ids"]), torch.tensor(b["labels"])), "int64", as_dict, True),
    "lists, another way": (each_of(torch.LongTensor), "int64", as_dict, True),
}  # fmt: skip


def loop_of(make: Callable[[Any], Made]) -> Loop:
    torch.manual_seed(0)

    def run(model: nn.Module, batch: Any) -> None:
        ids, labels = make(batch)
        F.cross_entropy(model(ids), labels).backward()

    return Loop(Tagger(), run)


def ids_in(batch: Any) -> Any:
    return batch["ids"] if isinstance(batch, dict) else batch.ids if hasattr(batch, "ids") else batch[0]


@pytest.mark.parametrize("name", CASES)
def test_an_id_past_the_table_is_named_before_the_step_and_a_stand_in_has_the_same_form(name: str) -> None:
    make, *kind = CASES[name]
    loop, batches = loop_of(make), Batches(*kind)
    for _ in range(9):
        seen = loop.step(batches(), go_on=False)
        assert (seen.violation, seen.checked.warnings) == (None, ())
    bad = batches(70)
    found = loop.step(bad, indices=[11, 12, 13, 14]).checked
    assert found.violation is not None and found.violation.bound is not None
    fact, bound = found.violation.batch, found.violation.bound
    assert (fact.element, fact.value, bound.low, bound.high, bound.op) == (BAD, 70, 0, VOCABULARY - 1, "embedding")
    assert fact.sample is not None and fact.sample.dataset_index == 13
    assert json.dumps(found.violation.summary)
    clean: Any = loop.guard.repaired(bad, found)
    ids, legal = ids_in(bad), ids_in(clean)
    assert type(clean) is type(bad) and type(legal) is type(ids)
    assert getattr(legal, "dtype", None) == getattr(ids, "dtype", None)
    assert np.asarray(ids)[BAD] == 70 and np.asarray(legal).max() < VOCABULARY
    assert loop.step(clean, go_on=False).violation is None
    assert loop.said == []


@pytest.mark.parametrize("name", CASES)
def test_a_guarded_loop_gets_the_very_tensors_that_it_gets_alone(name: str) -> None:
    def trained(step: Callable[[Loop, Any], Any]) -> list[torch.Tensor]:
        make, *kind = CASES[name]
        loop, batches = loop_of(make), Batches(*kind)
        for _ in range(4):
            step(loop, batches())
        return [parameter.grad for parameter in loop.model.parameters() if parameter.grad is not None]

    ours, alone = trained(lambda loop, batch: loop.step(batch)), trained(lambda loop, batch: loop.run(loop.model, batch))
    assert all(torch.equal(one, other) for one, other in zip(ours, alone, strict=True))


def test_a_bad_first_batch_is_refused_before_the_operator() -> None:
    found = loop_of(each_of(torch.as_tensor)).step(Batches("int64", as_dict, False)(70), indices=[1, 2, 3, 4]).refused
    assert found is not None
    assert (found.batch.key, found.batch.element, found.batch.value) == ("ids", BAD, 70)


MENDED = {
    "clipped": (lambda b: (torch.as_tensor(np.clip(b["ids"], 0, VOCABULARY - 1)), torch.as_tensor(b["labels"])), False),
    "clipped, then named": (lambda b: clipped(b["ids"], b["labels"]), False),
    "one by one": (lambda b: (torch.tensor([[min(i, 49) for i in row] for row in b["ids"]]), torch.tensor(b["labels"])), True),
}  # fmt: skip


def clipped(ids: Any, labels: Any) -> Made:
    legal = np.minimum(ids, VOCABULARY - 1)
    return torch.tensor(legal), torch.as_tensor(labels)


@pytest.mark.parametrize("name", MENDED)
def test_values_that_the_loop_mends_on_their_way_are_its_own_business(name: str) -> None:
    make, listed = MENDED[name]
    loop, batches = loop_of(make), Batches("int64", as_dict, listed)
    for step in range(12):
        seen = loop.step(batches(70 if step in (0, 7, 9) else None), go_on=False)
        assert seen.violation is None
    assert loop.said == []


def test_where_the_way_from_the_array_cannot_be_read_the_operator_itself_is_waited_for() -> None:
    """The numbers are the same, but nobody saw who copied them."""
    make: dict[str, Any] = {}
    exec("import torch\ndef made(b): return torch.tensor(b['ids'].tolist()), torch.as_tensor(b['labels'])", make)
    loop, batches = loop_of(make["made"]), Batches("int64", as_dict, False)
    for _ in range(6):
        assert loop.step(batches(), go_on=False).violation is None
    seen = loop.step(batches(70))
    assert seen.checked.violation is None and seen.refused is not None
    assert (seen.refused.batch.key, seen.refused.batch.value) == ("ids", 70)


def test_two_lists_of_the_same_numbers_are_told_apart_by_the_line_that_makes_tensors_of_them() -> None:
    def run(model: nn.Module, batch: Any) -> None:
        model.embed(torch.tensor(batch["ids"])).sum().backward()
        torch.tensor(batch["same"])

    loop, batches = Loop(Tagger(), run), Batches("int64", as_dict, True)
    for _ in range(6):
        ids = batches()["ids"]
        assert loop.step({"same": [list(row) for row in ids], "ids": ids}, go_on=False).violation is None
    ids = batches()["ids"]
    seen = loop.step({"same": batches(70)["ids"], "ids": ids}, go_on=False)
    assert seen.violation is None
    assert loop.step({"same": ids, "ids": batches(70)["ids"]}).checked.violation is not None


def test_what_no_tensor_is_made_of_is_let_alone_and_costs_no_further_trace() -> None:
    """Names, numbers of NumPy that are of one kind or another, None, lists that are ragged or of numbers and None, arrays of objects, memory maps."""
    loop, random = loop_of(lambda b: (b["ids"], b["labels"])), np.random.default_rng(0)
    turns = [np.int64(3), np.float32(0.5), 7, None, "seven", True, np.bool_(True), [1, None], [[1], [1, 2]], [1.5], []]
    for step in range(33):
        frozen = np.arange(3)
        frozen.flags.writeable = False
        rest = {
            "turn": turns[step % len(turns)],
            "names": np.array(["a", None], dtype=object),
            "frozen": frozen,
            "odd": random.random(3)[::-1],
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seen = loop.step(
                {"ids": torch.randint(0, VOCABULARY, (ROWS, COLUMNS)), "labels": torch.randint(0, CLASSES, (ROWS,)), **rest}, go_on=False
            )
        assert (seen.violation, seen.checked.warnings) == (None, ())
    assert not seen.checked.needs_trace
    assert loop.said == []


# Another form than ever


class Loader:
    """Hands batches to a loop as the hooks do; a bad one as its stand-in."""

    def __init__(self, loop: Loop, name: str, key: str, form: Callable[[torch.Tensor], Any]) -> None:
        make = MODELS[name][1]
        self.loop, self.found = loop, None
        self.batches: list[Any] = [make() for _ in range(9)]
        self.batches[7][key] = form(self.batches[7][key])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.loop.guard.step_ended()
        if not self.batches:
            raise StopIteration
        batch = self.batches.pop(0)
        checked = self.loop.guard.fetched(batch, indices=[4, 5, 6, 7], worker=None)
        if checked.violation is not None:
            self.found, batch = checked.violation, self.loop.guard.repaired(batch, checked)
        self.loop.guard.handed_over(checked, batch)
        return batch


def as_it_is(model: nn.Module, loader: Loader) -> None:
    for batch in loader:
        model(**batch)[0].backward()


def in_functions(model: nn.Module, loader: Loader) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return model(**batch)[0]

    for batch in loader:
        step(model, batch).backward()


def converting(model: nn.Module, loader: Loader) -> None:
    def moved(batch: Any) -> Any:
        return {key: torch.as_tensor(value) for key, value in batch.items()}

    for batch in loader:
        model(**moved(batch))[0].backward()


def converting_what_is_none(model: nn.Module, loader: Loader) -> None:
    for batch in loader:
        tensors = {key: value if torch.is_tensor(value) else torch.from_numpy(value) for key, value in batch.items()}
        model(**tensors)[0].backward()


def converting_once_it_is_fetched(model: nn.Module, loader: Loader) -> None:
    def fetched(batches: Iterator[Any]) -> Any:
        return next(batches, None)

    while (batch := fetched(loader)) is not None:
        model(**{key: torch.asarray(value) for key, value in batch.items()})[0].backward()


def converting_behind_a_generator(model: nn.Module, loader: Loader) -> None:
    def through(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:  # noqa: UP028  as a loader around another one has it
            yield batch

    for batch in through(loader):
        model(**{key: torch.as_tensor(value) for key, value in batch.items()})[0].backward()


def converting_what_was_gathered(model: nn.Module, loader: Loader) -> None:
    def gathered(batches: Iterator[Any]) -> list[Any]:
        for batch in batches:
            return [batch]
        return []

    for _ in range(len(loader.batches)):
        for batch in gathered(loader):
            model(**{key: torch.as_tensor(value) for key, value in batch.items()})[0].backward()


def converting_behind_the_loop_that_fetched(model: nn.Module, loader: Loader) -> None:
    while loader.batches:
        for batch in loader:
            break
        model(**{key: torch.as_tensor(value) for key, value in batch.items()})[0].backward()


class Converting(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**{key: torch.as_tensor(value) for key, value in batch.items()})


def converting_in_the_model(model: nn.Module, loader: Loader) -> None:
    as_it_is(Converting(model), loader)


def converting_in_a_hook(model: nn.Module, loader: Loader) -> None:
    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {key: torch.as_tensor(value) for key, value in kwargs.items()}

    model.register_forward_pre_hook(hook, with_kwargs=True)
    as_it_is(model, loader)


class Trainer:
    def __init__(self, model: nn.Module, prepare: Callable[[Any], Any]) -> None:
        self.model, self.prepare = model, prepare

    def train(self, loader: Loader) -> None:
        for batch in loader:
            self.model(**self.prepare(batch))[0].backward()


def converting_in_a_callback(model: nn.Module, loader: Loader) -> None:
    Trainer(model, lambda batch: {key: torch.as_tensor(value) for key, value in batch.items()}).train(loader)


def handing_on(model: nn.Module, loader: Loader) -> None:
    Trainer(model, lambda batch: batch).train(loader)


def started(name: str, key: str, form: Callable[[torch.Tensor], Any]) -> tuple[nn.Module, Loader]:
    torch.manual_seed(0)
    loop = Loop(MODELS[name][0](), lambda *_: None)
    return loop.model, Loader(loop, name, key, form)


@pytest.mark.parametrize("train", [as_it_is, in_functions, handing_on])
@pytest.mark.parametrize(("name", "key"), [("bert", "input_ids"), ("bert", "labels"), ("layoutlmv3", "bbox")])
@pytest.mark.parametrize("form", [torch.Tensor.numpy, torch.Tensor.tolist])
def test_an_array_where_always_was_a_tensor_is_named_before_the_step_of_a_loop_that_makes_none(
    name: str, key: str, form: Callable[[torch.Tensor], Any], train: Callable[[nn.Module, Loader], None]
) -> None:
    model, loader = started(name, key, form)
    train(model, loader)  # the stand-in is a tensor
    found: Any = loader.found
    assert (found.kind, found.batch.key, found.severity) == ("batch.dtype", key, "critical")
    assert f"{key} came as a" in found.summary and "needs a tensor" in found.summary
    assert "tensor in every batch before" in found.cause and "4, 5, 6, 7" in found.cause
    assert "torch.as_tensor" in found.fix
    assert loader.loop.said == []


@pytest.mark.parametrize(
    "train",
    [
        converting, converting_what_is_none, converting_once_it_is_fetched, converting_in_the_model, converting_in_a_hook, converting_in_a_callback,
        converting_behind_a_generator, converting_what_was_gathered, converting_behind_the_loop_that_fetched,
    ],
)  # fmt: skip
def test_a_loop_that_takes_both_is_let_alone(train: Callable[[nn.Module, Loader], None]) -> None:
    model, loader = started("bert", "input_ids", torch.Tensor.numpy)
    train(model, loader)
    assert (loader.found, loader.batches, loader.loop.said) == (None, [], [])


@pytest.mark.parametrize(("name", "key"), [("bert", "attention_mask"), ("layoutlmv3", "attention_mask")])
def test_one_that_only_the_step_can_judge_is_named_when_that_fails(name: str, key: str) -> None:
    model, loader = started(name, key, torch.Tensor.numpy)
    with pytest.raises((TypeError, AttributeError)) as raised:
        as_it_is(model, loader)
    found = loader.loop.guard.diagnose(raised.value)
    assert loader.found is None and found is not None
    assert (found.batch.key, found.batch.dtype) == (key, "numpy.ndarray of int64")
    assert f"{key} came as a NumPy array; it always was a tensor" in found.summary


def test_a_tensor_where_always_was_an_array_is_named_when_the_step_fails() -> None:
    loop, batches = loop_of(each_of(torch.from_numpy)), Batches("int64", as_dict, False)
    for _ in range(6):
        assert loop.step(batches(), go_on=False).violation is None
    batch = batches()
    found = loop.step({**batch, "ids": torch.as_tensor(batch["ids"])}).diagnosed
    assert found is not None
    assert found.summary == "ids came as a tensor; it always was a NumPy array"


@pytest.mark.parametrize("steps", [0, 2])
def test_an_array_that_meets_the_model_first_is_named_by_the_frame_that_holds_it(steps: int) -> None:
    make, batch = MODELS["bert"]
    loop = Loop(make(), lambda model, batch: model(**batch)[0].backward())
    for _ in range(steps):
        loop.step(batch(), go_on=False)
    found = loop.step({**batch(), "input_ids": batch()["input_ids"].numpy()}).diagnosed
    assert found is not None
    assert (found.kind, found.batch.key) == ("batch.dtype", "input_ids")
    assert "NumPy array" in found.summary


def test_an_exception_of_the_network_beside_an_array_names_nothing() -> None:
    def run(model: nn.Module, batch: Any) -> None:
        if isinstance(batch["ids"], np.ndarray):
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        F.cross_entropy(model(batch["ids"]), batch["labels"]).backward()

    loop = Loop(Tagger(), run)
    for _ in range(6):
        batch = {"ids": torch.randint(0, VOCABULARY, (ROWS, COLUMNS)), "labels": torch.randint(0, CLASSES, (ROWS,))}
        assert loop.step(batch, go_on=False).violation is None
    seen = loop.step({**batch, "ids": batch["ids"].numpy()})
    assert seen.raised is not None and seen.diagnosed is None


def test_a_tensor_of_unsigned_words_is_guarded_too() -> None:
    loop = loop_of(lambda b: (b["ids"].long(), b["labels"]))
    ids = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    for _ in range(6):
        assert loop.step({"ids": ids.to(torch.uint16), "labels": torch.arange(ROWS)}, go_on=False).violation is None
    bad = ids.clone()
    bad[BAD] = 70
    batch = {"ids": bad.to(torch.uint16), "labels": torch.arange(ROWS)}
    found = loop.step(batch).checked
    assert found.violation is not None and found.violation.batch.value == 70
    clean: Any = loop.guard.repaired(batch, found)
    assert clean["ids"].dtype == torch.uint16 and int(clean["ids"].long().max()) < VOCABULARY
    assert loop.said == []
