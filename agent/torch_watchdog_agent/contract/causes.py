"""Cause and fix in plain words, each tied to evidence in the batch. A table of recognisers, the most specific first; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torch_watchdog_agent.contract.facts import Facts, needed_dtype, range_words, summary

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
            channel = f"{facts.fact.key}[{facts.fact.element[0]}, ..., {facts.fact.element[-1]}]"
            where = f" All of {channel} is: a channel without variance was divided by its standard deviation of zero."
    return (
        f"The data itself holds {facts.fact.value} ({facts.fact.count} values) before any layer.{where}",
        "Add eps to the std when normalising (or use 1 where it is 0), and drop or filter samples that are not finite.",
    )


def _dtype(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.dtype":
        return None
    return (
        f"{facts.fact.key} came as {facts.fact.dtype}; the loss takes {needed_dtype(facts)}. The values may be fine: only the dtype is wrong.",
        f"Cast {facts.fact.key} in the collator, for example .float() for a float target.",
    )


def _device(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.device":
        return None
    return (
        f"{facts.fact.key} is on device {facts.fact.device}, and what consumes it is on another device. Its values were not read.",
        f"Move the batch to the device of the module that consumes it: {facts.fact.key}.to(device).",
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
        f"0 of {facts.tensor.numel()} positions of {facts.fact.key} are supervised: every label is {facts.rule.ignored}, so the mean loss is 0/0 = NaN. "
        "Truncation usually removed every answer.",
        "Use a longer max_length, truncate the prompt instead of the answer, or skip such batches.",
    )


def _nothing_to_attend(facts: Facts) -> tuple[str, str] | None:
    if facts.kind != "batch.empty":
        return None
    row = list(facts.fact.element[:-1]) if facts.fact.element else ""
    return (
        f"{facts.fact.key}{row} hides every position: the softmax runs over nothing but -inf and gives NaN.",
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
            f"The lengths in {facts.fact.key} add up to {found}, and there are {needed} rows to split: lengths and values come from different samples.",
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


def _pad_id(facts: Facts) -> tuple[str, str] | None:
    if facts.op != "embedding" or not isinstance(facts.value, int) or facts.value >= 0 or facts.value == -100:
        return None
    for name, mask in facts.leaves.items():
        if "mask" in name and mask.shape == facts.tensor.shape and not bool(mask[facts.bad_cells()].any()):
            return (
                f"All cells that hold {facts.value} have {name} 0: it is a padding id, and {facts.value} means that the tokenizer has no padding token. "
                "Masked positions are looked up all the same.",
                "Choose a real pad id (eos, unk, or a new token and a resized table).",
            )
    return (
        f"{facts.value} is below 0: usually a pad id that means 'no padding token', or a marker for 'unknown'.",
        "Choose a real pad id, or map unknown values to a row of their own.",
    )


def _label_mask_in_inputs(facts: Facts) -> tuple[str, str] | None:
    if facts.value != -100 or facts.op not in ("embedding", "embedding_bag"):
        return None
    for name, other in facts.leaves.items():
        if name != facts.fact.key and other.shape == facts.tensor.shape and torch.equal(other == -100, facts.bad_cells()):
            if other.untyped_storage().data_ptr() == facts.tensor.untyped_storage().data_ptr():
                return (
                    f"-100 is the label that a loss ignores. {facts.fact.key} and {name} share one storage: masking the labels overwrote the inputs.",
                    f"Clone before masking: labels = {facts.fact.key}.clone().",
                )
            return (
                f"-100 is the label that a loss ignores, and {name} holds it in the same cells: only labels may carry -100.",
                "Pass labels alone and let the model shift them, or replace -100 by the pad id (a copy) first.",
            )
    return (
        "-100 is the label that a loss ignores; an embedding has no such value.",
        "Replace -100 by the pad id in a copy before it becomes an input.",
    )


def _no_ignore_index(facts: Facts) -> tuple[str, str] | None:
    if facts.value != -100 or facts.op not in ("one_hot", "gather", "scatter"):
        return None
    return (
        f"{facts.op} has no ignore index: -100 is legal for cross_entropy, not here.",
        "Mask the ignored labels first: encode a dummy class there and multiply the loss by the mask.",
    )


def _segments(facts: Facts) -> tuple[str, str] | None:
    if "token_type" not in facts.name and "segment" not in facts.name and "token_type" not in facts.module:
        return None
    if not facts.fact.derived:
        return (
            f"The model has {facts.rows} segment{'' if facts.rows == 1 else 's'} (type_vocab_size={facts.rows}) "
            f"and {facts.fact.key} names segment {facts.value}.",
            "Drop token_type_ids, or send zeros.",
        )
    return None


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
    if "label" in facts.name or "target" in facts.name:
        return (
            f"The labels are {facts.tensor.shape[-1]} long and drive the decoder, which has {facts.rows} positions.",
            "Filter or truncate the sample to that many labels; a larger generation max_length does not help.",
        )
    return (
        f"The sequence is {facts.tensor.shape[-1]} long, longer than the {facts.rows} positions of the model.",
        f"Truncate to max_length={facts.rows}, or split the long sample.",
    )


def _difference(facts: Facts) -> tuple[str, str] | None:
    derived = facts.fact.derived
    if derived is None or " - " not in derived.expression or not isinstance(derived.value, int) or derived.value >= 0:
        return None
    return (
        f"The difference {derived.expression} is negative ({derived.value}): no single coordinate is out of range, two corners are swapped.",
        "Order the corners in preprocessing so that x0 <= x1 and y0 <= y1.",
    )


def _coordinate(facts: Facts) -> tuple[str, str] | None:
    if "box" not in facts.name and "position_embeddings" not in facts.module:
        return None
    if "box" not in facts.name:
        return None
    return (
        f"The box coordinate {facts.value} is past the position table of {facts.rows} rows.",
        "Normalise boxes by the true page size, then clamp them to the documented range.",
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


def _edges(facts: Facts) -> tuple[str, str] | None:
    if "edge" not in facts.name:
        return None
    return (
        f"The edge names node {facts.value}; the graph has {facts.rows} nodes in this batch.",
        "Relabel (renumber) the nodes from 0, or add the isolated nodes.",
    )


def _spans(facts: Facts) -> tuple[str, str] | None:
    named = any(word in facts.name for word in ("span", "start", "end"))
    if not named or facts.op not in ("gather", "index", "index_select", "cross_entropy"):
        return None
    return (
        f"The span reaches position {facts.value}, the text has length {facts.rows} in this batch: it was truncated after the spans were computed.",
        "Drop or clip spans past the cut.",
    )


def _positions(facts: Facts) -> tuple[str, str] | None:
    if "pos" not in facts.name:
        return None
    return (
        f"The position {facts.value} is past a table (a cache or buffer) of length {facts.rows}.",
        "Make the cache or table larger, or use a shorter prompt and fewer new tokens (truncate).",
    )


def _void_class(facts: Facts) -> tuple[str, str] | None:
    if facts.value != 255 or not _is_label(facts):
        return None
    ignored = facts.bound.ignored[0] if facts.bound is not None and facts.bound.ignored else None
    return (
        f"255 is the usual void value of masks; this loss ignores {ignored if ignored is not None else 'nothing'}, and there are {facts.rows} classes.",
        f"Set the loss's ignore index to 255, or map 255 to {ignored if ignored is not None else 'a class'}.",
    )


def _one_logit(facts: Facts) -> tuple[str, str] | None:
    if facts.rows != 1 or facts.op != "gather":
        return None
    return (
        f"The head has one logit (width 1: regression), and label {facts.value} names a second class.",
        "Use num_labels=2, or turn label smoothing off.",
    )


def _from_one(facts: Facts) -> tuple[str, str] | None:
    if facts.value != facts.rows or not _is_label(facts) or facts.rows == 0:
        return None
    return (
        f"The class id {facts.value} equals the number of classes ({facts.rows}): the ids start at 1 instead of 0, or the head has one class too few "
        "(num_labels).",
        "Renumber the classes so that they start at 0, or enlarge the head (num_labels, id2label).",
    )


def _unknown_label(facts: Facts) -> tuple[str, str] | None:
    if not _is_label(facts) or not isinstance(facts.value, int) or facts.value >= 0:
        return None
    return (
        f"Label {facts.value} is no class; it looks like a marker for 'unknown'.",
        f"Map it to a class, drop the sample, or set ignore_index={facts.value}.",
    )


def _head_too_small(facts: Facts) -> tuple[str, str] | None:
    if not _is_label(facts) or not isinstance(facts.value, int):
        return None
    return (
        f"The head has {facts.rows} classes and the data needs at least {facts.needed}: the head probably comes from another configuration.",
        "Pass num_labels / id2label that fit the data, or fix the labels.",
    )


def _is_label(facts: Facts) -> bool:
    losses = ("cross_entropy", "nll_loss", "nll_loss2d", "multi_margin_loss", "multilabel_margin_loss", "one_hot", "ctc_loss")
    words = ("label", "target", "cls", "class", "mask")
    return facts.op in losses or (
        facts.op in ("gather", "index", "scatter", "take_along_dim") and any(word in facts.name for word in words)
    )


def _tokens(facts: Facts) -> tuple[str, str] | None:
    if facts.op not in ("embedding", "embedding_bag") or not isinstance(facts.value, int) or facts.value < 0:
        return None
    if facts.tensor.dim() >= 3 or not _looks_like_tokens(facts):
        return (
            f"The category {facts.value} was unseen when the table of {facts.rows} rows ({facts.module or 'embedding'}) was made.",
            "Reserve an id for unknown categories and fit the encoder with it, or resize the table to more rows.",
        )
    return (
        f"Tokenizer and model disagree: the embedding table has {facts.rows} rows, the vocabulary of this batch needs at least {facts.needed} "
        "(tokens were added, or the tokenizer belongs to another model).",
        "Resize the embeddings to len(tokenizer) (under an adapter: before it is attached), or load the tokenizer that matches.",
    )


def _looks_like_tokens(facts: Facts) -> bool:
    return (
        "input" in facts.name
        or "token" in facts.name
        or "ids" in facts.name
        or facts.tensor.shape[-1:] > torch.Size([3])
        or facts.rows > 1000
    )


def _plain(facts: Facts) -> tuple[str, str]:
    value = facts.fact.derived.value if facts.fact.derived is not None else facts.value
    return (
        f"{facts.op} takes values {range_words(facts.bound) if facts.bound is not None else 'in a range'} and gets {value} from {facts.fact.key}.",
        f"Correct {facts.fact.key} where it is made, or give {facts.module or facts.op} a larger table.",
    )


_RECOGNISERS: tuple[Callable[[Facts], tuple[str, str] | None], ...] = (
    *(_not_finite, _dtype, _device, _outlier, _nothing_supervised, _nothing_to_attend, _groups, _counts, _batch_norm, _ctc, _offsets),
    *(_positions_from_padding, _too_long, _difference, _label_mask_in_inputs, _pad_id, _no_ignore_index, _segments, _coordinate),
    *(_edges, _spans, _positions, _one_logit, _void_class, _unknown_label, _from_one, _head_too_small, _tokens, _plain),
)
