"""A cause is as sure as its evidence: how many values are bad, what the batches before held, and what the tokenizer of the process says."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from guard_loop import Loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torch_watchdog_agent.contract.causes import Explanation, explained
from torch_watchdog_agent.contract.facts import Facts, tokenizer_sizes
from torch_watchdog_agent.contract.findings import Past
from torch_watchdog_proto.messages import BatchFact, BoundFact, Derived

ROWS = 64
CLEAN = Past(batches=40, low=0, high=63)


def told(
    tensor: torch.Tensor, value: int, *, key: str = "input_ids", op: str = "embedding", rows: int = ROWS, past: Past | None = CLEAN,
    tokenizers: tuple[int, ...] = (), derived: Derived | None = None,
) -> Explanation:  # fmt: skip
    fact = BatchFact(key=key, element=(0, 0), value=value, count=1, derived=derived)
    bound = BoundFact(low=0, high=rows - 1, ignored=(-100,) if op == "cross_entropy" else (), op=op, module="model.table")
    facts = Facts(
        kind="batch.index_out_of_range", fact=fact, bound=bound, leaves={key: tensor}, rule=None, past=past, tokenizer_sizes=lambda: tokenizers
    )  # fmt: skip
    return explained(facts)


def ids(*bad: int, rows: int = 8, columns: int = 1024) -> torch.Tensor:
    made = torch.arange(rows * columns).reshape(rows, columns) % ROWS
    made[0, : len(bad)] = torch.tensor(bad)
    return made


def test_one_far_value_among_thousands_is_called_corrupt_and_no_tokenizer_is_blamed() -> None:
    said = told(ids(81_234), 81_234)
    assert "corrupt" in said.cause
    assert "1 of 8192 values is outside 0..63; the 40 batches before held values 0..63" in said.cause
    assert "okenizer" not in said.cause + said.fix
    assert "esize" not in said.fix


@pytest.mark.parametrize("past", [None, Past(batches=1, low=0, high=63)])
def test_without_a_clean_past_a_far_value_may_be_a_token(past: Past | None) -> None:
    assert "corrupt" not in told(ids(81_234), 81_234, past=past).cause


def test_many_far_values_are_not_one_corrupt_value() -> None:
    said = told(ids(*[81_234] * 40), 81_234)
    assert "40 of 8192 values are outside" in said.cause
    assert "another model" in said.cause


def test_a_number_that_no_table_could_hold_is_corrupt_however_many_there_are() -> None:
    assert "corrupt" in told(ids(*[2**40] * 40), 2**40, past=None).cause


def test_a_value_just_past_the_end_is_left_open_and_the_fix_says_how_to_tell() -> None:
    said = told(ids(70), 70)
    assert "needs 71" in said.cause
    assert "tokens were added" in said.cause
    assert "the value is wrong" in said.cause
    assert "Compare len(tokenizer)" in said.fix


def test_a_larger_tokenizer_in_the_process_is_proof_that_it_disagrees() -> None:
    said = told(ids(70), 70, tokenizers=(72,))
    assert said.cause.startswith("Tokenizer and model disagree: the tokenizer of this process has 72 tokens, the table 64 rows")
    assert "Resize" in said.fix


def test_a_value_that_the_tokenizer_does_not_have_either_is_no_token() -> None:
    said = told(ids(70), 70, tokenizers=(64,))
    assert said.cause.startswith("70 is no token: the tokenizer of this process has 64")
    assert "esize" not in said.fix


def test_two_tokenizers_of_different_sizes_tell_nothing() -> None:
    assert "No tokenizer in this process tells" in told(ids(70), 70, tokenizers=(64, 72)).cause


@pytest.mark.parametrize("key", ["query.user", "batch[1]", "rows.item_ids"])
def test_where_nothing_speaks_of_text_nobody_is_told_of_tokenizers(key: str) -> None:
    said = told(ids(70), 70, key=key)
    assert "a new user, item or class" in said.cause and said.fix.startswith("Resize model.table: a row for each id")
    assert "okenizer" not in said.cause + said.fix
    assert "another tokenizer" in told(ids(70), 70, key=key, tokenizers=(64,)).cause


@pytest.mark.parametrize("op", ["embedding", "embedding_bag", "index_select", "gather"])
def test_no_larger_table_takes_a_value_below_0(op: str) -> None:
    said = told(ids(-1), -1, key="query.history", op=op)
    assert ("larger" not in said.fix and "Choose a real pad id" in said.fix) or said.fix == "Correct query.history where it is made."


@pytest.mark.parametrize("value", [-(2**63), -(2**31)])
def test_what_nan_becomes_as_an_integer_is_recognised(value: int) -> None:
    said = told(ids(value), value)
    assert "NaN" in said.cause
    assert "isfinite" in said.fix


def labels(*values: int) -> torch.Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("tensor", "past", "starts_at_1"),
    [
        (labels(4, 1, 2), None, False),  # three labels of one batch do not tell
        (labels(4, *[1, 2, 3] * 11), None, True),
        (labels(4, 1, 2), Past(batches=3, low=1, high=3), True),
        (labels(4, 0, 2), None, False),
        (labels(4, 1, 2), Past(batches=3, low=0, high=3), False),
        (labels(4, 2, 2), Past(batches=3, low=1, high=3), True),
        (labels(4, 3, 2), Past(batches=3, low=2, high=3), False),
        (labels(4, 3, -100), None, False),
    ],
)
def test_ids_are_said_to_start_at_1_only_where_1_is_the_smallest_that_was_seen(
    tensor: torch.Tensor, past: Past | None, starts_at_1: bool
) -> None:
    said = told(tensor, 4, key="labels", op="cross_entropy", rows=4, past=past)
    assert ("start at 1" in said.cause) is starts_at_1
    assert "equals the number of classes (4)" in said.cause and ("Renumber" in said.fix) is starts_at_1


def test_a_few_void_pixels_are_void_and_not_corrupt() -> None:
    mask = torch.zeros(2, 64, 64, dtype=torch.long)
    mask[1, 4, 0] = 255
    said = told(mask, 255, key="labels", op="cross_entropy", rows=4)
    assert "void" in said.cause


def test_the_tokenizers_that_live_in_the_process_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class PreTrainedTokenizerBase:
        def __len__(self) -> int:
            return 70

    module = ModuleType("transformers.tokenization_utils_base")
    module.PreTrainedTokenizerBase = PreTrainedTokenizerBase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tokenizer_sizes.cache_clear()
    kept = PreTrainedTokenizerBase()
    assert tokenizer_sizes() == (len(kept),)
    tokenizer_sizes.cache_clear()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).mean(1)


def train(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    F.cross_entropy(model(batch["input_ids"]), batch["labels"]).backward()


@pytest.mark.parametrize("clean", [1, 6])
def test_the_past_is_what_came_before_the_bad_batch_held_or_refused(clean: int) -> None:
    """After one batch nothing is certain yet, so the op is refused inside; later the batch is held. Its own values are no part of the past."""
    loop = Loop(Tiny(), train)
    for step in range(clean):
        made = torch.full((4, 8), step)
        assert loop.step({"input_ids": made, "labels": torch.zeros(4, dtype=torch.long)}).violation is None
    found = loop.step({"input_ids": torch.full((4, 8), 70), "labels": torch.zeros(4, dtype=torch.long)}).violation
    assert found is not None
    before = "the batch before held values 0..0" if clean == 1 else f"the {clean} batches before held values 0..{clean - 1}"
    assert before in found.cause
