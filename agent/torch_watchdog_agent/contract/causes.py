"""Cause and fix in plain words, each tied to evidence in the batch. A table of recognisers, the most specific first; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torch_watchdog_agent.contract.facts import Facts, needed_dtype, summary, usable_length
from torch_watchdog_agent.contract.wrong_values import WRONG_VALUES

__all__ = ["Explanation", "explained"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What happened, why, and what to do."""

    summary: str
    cause: str
    fix: str


Recogniser: TypeAlias = Callable[[Facts], tuple[str, str] | None]


def explained(facts: Facts) -> Explanation:
    """The most specific explanation that the evidence carries."""
    for recogniser in _RECOGNISERS:
        found = recogniser(facts)
        if found is not None:
            return Explanation(summary(facts), *found)
    raise AssertionError("the last recogniser takes everything")


# Recognisers


def _not_finite(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.not_finite":
        return None
    where = ""
    if facts.tensor.dim() >= 3 and facts.fact.element is not None:
        column = facts.tensor[facts.fact.element[0], ..., facts.fact.element[-1]]
        if not bool(torch.isfinite(column).any()):
            channel = f"{facts.spoken}[{facts.fact.element[0]}, ..., {facts.fact.element[-1]}]"
            where = f" All of {channel} is, as when a channel without variance is divided by its standard deviation of zero."
    return (
        f"The data itself holds {facts.fact.value} ({facts.fact.count} values) before any layer.{where}",
        "Add eps to the std when normalising (or use 1 where it is 0), and drop or filter samples that are not finite.",
    )


def _dtype(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.dtype":
        return None
    return (
        f"{facts.spoken} came as {facts.fact.dtype}; the loss takes {needed_dtype(facts)}. The values may be fine: only the dtype is wrong.",
        f"Cast {facts.spoken} in the collator, for example .float() for a float target.",
    )


def _device(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.device":
        return None
    return (
        f"{facts.spoken} is on device {facts.fact.device}, and what consumes it is on another device. Its values were not read.",
        f"Move the batch to the device of the module that consumes it: {facts.spoken}.to(device).",
    )


def _outlier(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.size_outlier":
        return None
    times = facts.tensor.numel() / max(1, facts.rows - 1)
    longest = f"; its longest row is {facts.tensor.shape[1]} long, the others are mostly padding" if facts.tensor.dim() == 2 else ""
    return (
        f"This batch is {times:.0f} times larger than the largest seen{longest}. Activations grow with it: it may not fit into memory.",
        "Truncate long samples, bucket by length, or cap the tokens in a batch.",
    )


def _nothing_supervised(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.empty" or facts.rule is None or facts.rule.kind != "some":
        return None
    return (
        f"0 of {facts.tensor.numel()} positions of {facts.spoken} are supervised: every label is {facts.rule.ignored}, so the mean loss is 0/0 = NaN. "
        "Truncation usually removed every answer.",
        "Use a longer max_length, truncate the prompt instead of the answer, or skip such batches.",
    )


def _nothing_to_attend(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.empty":
        return None
    row = list(facts.fact.element[:-1]) if facts.fact.element else ""
    return (
        f"{facts.spoken}{row} hides every position: the softmax runs over nothing but -inf and gives NaN.",
        "Drop empty samples, or keep at least one position visible in the mask.",
    )


def _groups(facts: Facts) -> tuple[str, str] | None:
    if facts.rule is None or facts.rule.kind != "groups":
        return None
    counts = facts.tensor.flatten(1).sum(1).tolist()
    return (
        f"The masked counts per sample are {counts}: they must be equal, because the selected rows are laid side by side in one tensor.",
        "Mask the same fixed number of positions in every sample.",
    )


def _counts(facts: Facts) -> tuple[str, str] | None:
    if facts.rule is None or facts.rule.kind not in ("count", "agree", "sum") or facts.fact.derived is None or facts.bound is None:
        return None
    found, needed = facts.fact.derived.value, facts.bound.high
    if facts.rule.kind == "sum":
        return (
            f"The lengths in {facts.spoken} add up to {found}, and there are {needed} rows to split: lengths and values come from different samples.",
            "Rebuild the lengths from the values that are really in the batch (after truncation and filtering).",
        )
    return (
        f"{facts.fact.derived.expression} is {found}, and there is room for {needed}: the marked positions (placeholder tokens, mask) "
        f"and the features that go there do not match. Truncation usually cut placeholders off, or the processor belongs to another model.",
        "Truncate text, not placeholders (a longer max_length), and let the processor of this very model expand them.",
    )


def _batch_norm(facts: Facts) -> tuple[str, str] | None:
    if facts.rule is None or facts.rule.kind != "spread":
        return None
    return (
        "The batch has 1 sample, and batch normalisation in training needs more than one value per channel. It is usually the last batch.",
        "Set drop_last=True on the DataLoader.",
    )


def _ctc(facts: Facts) -> tuple[str, str] | None:
    if facts.rule is None or facts.rule.kind != "ctc" or facts.fact.derived is None or facts.bound is None:
        return None
    return (
        f"The target needs {facts.fact.derived.value} frames (its length, and a blank between repeated labels) and has {facts.bound.high}: CTC gives inf.",
        "Drop or filter such samples, or reduce the down-sampling so that there are more frames; zero_infinity only hides it.",
    )


def _positions_from_padding(facts: Facts) -> tuple[str, str] | None:
    if facts.fact.derived is None or "cumsum" not in facts.fact.derived.expression:
        return None
    longest = facts.fact.element[-1] if facts.fact.element else "the limit"
    return (
        f"Positions start after the padding id here ({facts.fact.derived.expression}): the sample is long enough to reach position "
        f"{facts.fact.derived.value}, and the table ends at {facts.rows - 1}.",
        f"Truncate to {longest} tokens: set max_length={longest}.",
    )


def _too_long(facts: Facts) -> tuple[str, str] | None:
    if facts.rule is None or facts.rule.recipe.leaves or facts.kind != "batch.shape":
        return None
    length, derived = facts.tensor.shape[-1], facts.fact.derived
    reached = derived.value if derived is not None and isinstance(derived.value, int) else facts.rows
    too_many = facts.fact.element if facts.rule.kind != "reach" else None  # the first cell past the end: 0 but for its row and its place
    longest = (too_many[-1] or max(too_many)) if too_many else usable_length(length, reached, facts.rows - 1)
    offset = "" if longest >= facts.rows else f" (positions begin at {facts.rows - longest}, so that {longest} tokens fit)"
    if "label" in facts.name or "target" in facts.name:
        return (
            f"The labels are {length} long and drive the decoder, which has {facts.rows} positions{offset}.",
            f"Filter or truncate the sample to {longest} labels; a larger generation max_length does not help.",
        )
    return (
        f"The sequence is {length} long, and the table of positions has {facts.rows} rows{offset}.",
        f"Truncate to max_length={longest}, or split the long sample.",
    )


def _offsets(facts: Facts) -> tuple[str, str] | None:
    if facts.rule is None or facts.rule.arg != "offsets":
        return None
    if facts.rule.kind == "starts":
        first = facts.fact.element in (None, (0,))
        wrong = "the first bag must begin at 0" if first else "the offset is smaller than the one before it: bags follow each other"
        return (
            f"The bag offset is {facts.value}; {wrong}. A GPU (and a CPU, for some modes) reads memory past its end then.",
            "Rebuild the offsets from the real lengths of the bags: a cumulative sum that begins with 0.",
        )
    return (
        f"The bag offset {facts.value} is past the end of the {facts.rows - 1} values: recorded lengths and values disagree.",
        "Rebuild the offsets from the real lengths of the bags.",
    )


_RECOGNISERS: tuple[Recogniser, ...] = (
    *(_not_finite, _dtype, _device, _outlier, _nothing_supervised, _nothing_to_attend, _groups, _counts, _batch_norm, _ctc, _offsets),
    *(_positions_from_padding, _too_long, *WRONG_VALUES),
)
