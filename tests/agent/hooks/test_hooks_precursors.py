"""What the rules need to warn early: how near probabilities come to their edge, and how many ids the tokenizer of the data has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from listening import listen_to

from torch_watchdog_agent.tokenizer import tokens_of

pytestmark = pytest.mark.e2e  # scripts with torch in processes of their own

TRACED = 4  # first steps, in which bounds are learned and nothing else is looked at


@pytest.mark.parametrize("how", ["unbounded", "scripted"])
def test_the_reach_of_probabilities_that_nothing_keeps_inside_is_recorded_with_their_step(folder: Path, how: str) -> None:
    heard = listen_to(folder, "precursors.py", how)
    assert heard.complaints == []
    assert heard.reaches[TRACED:] == pytest.approx(heard.printed[TRACED:])
    assert heard.tokenizers == {7}


def test_probabilities_of_a_sigmoid_are_not_looked_at(folder: Path) -> None:
    heard = listen_to(folder, "precursors.py", "bounded")
    assert (heard.complaints, set(heard.reaches)) == ([], {0.0})


class Tokenizer:
    def __init__(self, ids: int) -> None:
        self._ids = ids

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._ids)}


class Part:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def collate(self) -> None: ...

    @property
    def tokenizer(self) -> Tokenizer:
        raise AssertionError("a property is the user's code: it is not run")


@pytest.mark.parametrize(
    ("loader", "tokens"),
    [
        (Part(dataset=Part(tokenizer=Tokenizer(9))), 9),
        (Part(dataset=Part(dataset=Part(tokenizer=Tokenizer(9)))), 9),
        (Part(collate_fn=Part(data_collator=Part(tokenizer=Tokenizer(9)))), 9),
        (Part(collate_fn=Part(processor=Part(tokenizer=Tokenizer(9))).collate), 9),
        (Part(collate_fn=Part(processing_class=Tokenizer(9)), dataset=Part(tokenizer=Tokenizer(9))), 9),
        (Part(collate_fn=Part(tokenizer=Tokenizer(8)), dataset=Part(tokenizer=Tokenizer(9))), 0),
        (Part(collate_fn=lambda rows: rows, dataset=[1, 2]), 0),
        (Part(dataset=Part()), 0),
    ],
)
def test_a_tokenizer_is_found_in_the_parts_of_a_loader_and_two_that_differ_tell_nothing(loader: Part, tokens: int) -> None:
    assert tokens_of(loader) == tokens
