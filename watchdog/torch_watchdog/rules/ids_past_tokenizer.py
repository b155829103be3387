"""batch.index_out_of_range that no operator will ever tell: ids past the tokenizer's, in the rows that its table was padded with.

Only where the loader's own collate function or data set holds the tokenizer, and only for tables that are a little longer than it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, at_least
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import KeyStream, View

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where one of a rank's newest 64 batches holds an id that the tokenizer has not, in a table of at most `padding` times the tokenizer's ids."""

    padding: float = at_least(1, 1.1)


ABOUT = About(
    name="ids_past_tokenizer",
    kind="batch.index_out_of_range",
    watches="the highest value of each index tensor whose table is a little longer than the tokenizer",
    says="rank 1, step 200: input_ids holds 50261; the tokenizer has ids up to 50256, and the table was padded to 50304 rows (1 of the newest 64 batches)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for key, seen in view.keys.items():
        if seen.bound_high is not None and len(seen.highs.count):
            yield from _past(view, key, seen, seen.bound_high, settings)


def _past(view: View, key: str, seen: KeyStream, bound: float, settings: Settings) -> Iterable[Sign]:
    tokens = view.tokens_of[: len(seen.highs.count)]
    rows = np.flatnonzero((tokens > 0) & (tokens <= bound) & (bound + 1 <= settings.padding * tokens))
    highs = seen.highs.ordered(rows)
    past = highs >= tokens[rows, None]
    for at in np.flatnonzero(past.any(axis=1)):
        rank, step = view.ranks[rows[at]], int(seen.steps.newest()[rows[at]])
        yield Sign(
            rank=rank,
            step=step,
            subject=key,
            said=f"rank {rank}, step {step}: {key} holds {np.nanmax(highs[at]):.0f}; the tokenizer has ids up to {tokens[rows[at]] - 1}, and the table was "
            f"padded to {bound + 1:.0f} rows ({np.count_nonzero(past[at])} of the newest {np.count_nonzero(~np.isnan(highs[at]))} batches)",
            cause="the id was made by another tokenizer, or added without it: its row was never trained, and no operator will ever complain",
            fix="tokenize the data anew with this tokenizer, or add the missing tokens to it",
        )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_stretch=True, each_rank=True)
