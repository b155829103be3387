"""Cause and fix of a value that is out of range, each tied to evidence in the batch, in the batches before it, or in the process. Pure."""

from __future__ import annotations

import re

import torch

from torch_watchdog_agent.contract.facts import Facts, range_words

__all__ = ["WRONG_VALUES"]

_NAN_AS_INTEGER = (-(2**63), -(2**31))
_LOOKUPS = (
    "embedding",
    "embedding_bag",
    "cross_entropy",
    "nll_loss",
    "nll_loss2d",
    "gather",
    "index",
    "index_select",
    "one_hot",
    "scatter",
)
_FAR = 16  # times the table
_TEXT = re.compile(r"^ids$|token|input|text|word|wte|tok_|vocab")  # in the name of a batch's tensor, or of a table
_NO_TABLE = 1 << 31
_TELLING_LABELS = 8  # times the classes: one batch of so many would hold a 0 if there were any


def _declared(facts: Facts) -> tuple[str, str] | None:
    """A person's own bound: of an operator or a table nothing is known."""
    if facts.op != "declared" or facts.bound is None:
        return None
    return (
        f"{facts.spoken} holds {facts.value}, and {range_words(facts.bound)} was declared for it in {facts.bound.source} ({facts.evidence}).",
        f"Correct {facts.spoken} where it is made, or the bound where it is declared.",
    )


def _pad_id(facts: Facts) -> tuple[str, str] | None:
    if facts.op not in ("embedding", "embedding_bag") or not isinstance(facts.value, int) or facts.value >= 0 or facts.value == -100:
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
                    f"-100 is the label that a loss ignores. {facts.spoken} and {name} share one storage: masking the labels overwrote the inputs.",
                    f"Clone before masking: labels = {facts.spoken}.clone().",
                )
            return (
                f"-100 is the label that a loss ignores, and {name} holds it in the same cells: only labels may carry -100.",
                "Pass labels alone and let the model shift them, or replace -100 by the pad id (a copy) first.",
            )
    for name, other in facts.leaves.items():
        if name != facts.fact.key and other.shape == facts.tensor.shape and _shifted_alike(facts.bad_cells(), other == -100):
            return (
                f"-100 is the label that a loss ignores, and {name}, shifted by one, holds it in the same cells: {name} was shifted before its -100 was "
                "replaced.",
                f"Replace -100 by the pad id when {name} is shifted, or pass {name} alone: the model shifts them itself.",
            )
    return (
        "-100 is the label that a loss ignores; an embedding has no such value.",
        "Replace -100 by the pad id in a copy before it becomes an input.",
    )


def _shifted_alike(cells: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether the cells are those of the labels, one place to the right."""
    return cells.dim() > 1 and bool(torch.equal(cells[..., 1:], labels[..., :-1]))


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
            f"and {facts.spoken} names segment {facts.value}.",
            "Drop token_type_ids, or send zeros.",
        )
    return None


def _difference(facts: Facts) -> tuple[str, str] | None:
    derived = facts.fact.derived
    if derived is None or " - " not in derived.expression or not isinstance(derived.value, int) or derived.value >= 0:
        return None
    return (
        f"The difference {derived.expression} is negative ({derived.value}): no single coordinate is out of range, two corners are swapped.",
        "Order the corners in preprocessing so that x0 <= x1 and y0 <= y1.",
    )


def _coordinate(facts: Facts) -> tuple[str, str] | None:
    if "box" not in facts.name or not isinstance(facts.value, int):
        return None
    if facts.value < 0:
        return (
            f"The box coordinate {facts.value} is below 0: the box reaches past the left or upper edge of its page (rotation, cropping, or another origin).",
            "Clamp boxes to the page before they are normalised.",
        )
    return (
        f"The box coordinate {facts.value} is past the position table of {facts.rows} rows.",
        "Normalise boxes by the true page size, then clamp them to the documented range.",
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
    if bool((facts.tensor == 0).any()) or (facts.past is not None and facts.past.low == 0):
        return (
            f"The class id {facts.value} equals the number of classes ({facts.rows}), and class 0 occurs, too ({facts.evidence}): "
            "the head has one class too few (num_labels), or this label is wrong.",
            "Enlarge the head (num_labels, id2label), or correct the label; classes start at 0.",
        )
    of_few = facts.past is None and int((facts.tensor >= 0).sum()) < _TELLING_LABELS * facts.rows
    if of_few or _smallest_class(facts) != 1:
        # Nothing that was seen says where they begin.
        return (
            f"The class id {facts.value} equals the number of classes ({facts.rows}), whose last is {facts.rows - 1} ({facts.evidence}): "
            "the head has one class too few (num_labels), or this label is wrong.",
            "Enlarge the head (num_labels, id2label), or correct the label; classes start at 0.",
        )
    start = "the ids start at 1 instead of 0, or this label is wrong"
    if bool((facts.tensor == 1).any()):
        start = "the ids probably start at 1 instead of 0"
    return (
        f"The class id {facts.value} equals the number of classes ({facts.rows}), and no 0 was seen ({facts.evidence}): {start}.",
        "Renumber the classes so that they start at 0, or enlarge the head (num_labels, id2label).",
    )


def _smallest_class(facts: Facts) -> int:
    """That was seen; an ignored label is none."""
    here = int(facts.tensor[facts.tensor >= 0].min())
    before = facts.past.low if facts.past is not None else None
    return min(here, int(before)) if before is not None and before >= 0 else here


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
        f"The head has {facts.rows} classes and this batch needs {facts.needed} ({facts.evidence}): "
        "the head comes from another configuration, or the label is wrong.",
        "Pass num_labels / id2label that fit the data, or fix the labels.",
    )


def _is_label(facts: Facts) -> bool:
    losses = ("cross_entropy", "nll_loss", "nll_loss2d", "multi_margin_loss", "multilabel_margin_loss", "one_hot", "ctc_loss")
    words = ("label", "target", "cls", "class", "mask")
    return facts.op in losses or (
        facts.op in ("gather", "index", "scatter", "take_along_dim") and any(word in facts.name for word in words)
    )


def _tokens(facts: Facts) -> tuple[str, str] | None:
    if facts.op not in ("embedding", "embedding_bag") or not isinstance(facts.value, int) or facts.value < 0 or facts.fact.derived:
        return None
    if facts.tensor.dim() >= 3 or not _looks_like_tokens(facts):
        return (
            f"The category {facts.value} has no row in a table of {facts.rows} ({facts.module or 'embedding'}): {facts.evidence}. "
            "Usually a category that was unseen when the table was made.",
            "Reserve an id for unknown categories and fit the encoder with it, or resize the table to more rows.",
        )
    sizes = facts.tokenizer_sizes()
    if len(sizes) == 1:
        return _told_by_tokenizer(facts, sizes[0])
    if not sizes and not any(map(_TEXT.search, (facts.name, facts.module.lower()))):
        return (
            f"The table has {facts.rows} rows and this batch needs {facts.needed} ({facts.evidence}): an id that was not there when the table was made "
            "(a new user, item or class), or a wrong value.",
            f"Resize {facts.module or 'the table'}: a row for each id, and one for ids that are not known yet. If this one cannot be, correct {facts.spoken}.",
        )
    return (
        f"The table has {facts.rows} rows and this batch needs {facts.needed} ({facts.evidence}). No tokenizer in this process tells which it is: "
        f"tokens were added to the tokenizer and not to the model, the tokenizer belongs to another model, or the value is wrong.",
        "Compare len(tokenizer) with the table. Larger: resize the embeddings to it (under an adapter: before it is attached), or load the tokenizer "
        "that matches. Not larger: mend the sample.",
    )


def _told_by_tokenizer(facts: Facts, size: int) -> tuple[str, str]:
    if facts.needed > size:
        return (
            f"{facts.value} is no token: the tokenizer of this process has {size}, the table {facts.rows} rows ({facts.evidence}). "
            "The ids were made by another tokenizer, or the value is wrong.",
            "Look at the sample: tokenize the data anew with this tokenizer, or drop the sample.",
        )
    return (
        f"Tokenizer and model disagree: the tokenizer of this process has {size} tokens, the table {facts.rows} rows ({facts.evidence}).",
        "Resize the embeddings to len(tokenizer) (under an adapter: before it is attached), or load the tokenizer that matches.",
    )


def _cast_from_nan(facts: Facts) -> tuple[str, str] | None:
    value = facts.fact.derived.value if facts.fact.derived is not None else facts.value
    if value not in _NAN_AS_INTEGER:
        return None
    source = f"{facts.cell} is {facts.value}" if facts.tensor.is_floating_point() else f"{facts.spoken} was made from floats"
    return (
        f"{value} is what NaN, or a number too large, becomes when it is cast to an integer: {source}. "
        "A GPU makes 0 or garbage of it instead, and reports nothing.",
        "Find what makes the NaN (a missing value, a division by 0) and fill or drop it before the cast: torch.isfinite(x).all().",
    )


def _absurd(facts: Facts) -> tuple[str, str] | None:
    """So far outside, and so alone, that no table of a sensible size would hold it."""
    if (
        not isinstance(facts.value, int)
        or facts.fact.derived is not None
        or not facts.rows
        or facts.op not in _LOOKUPS
        or facts.value == -100
    ):
        return None
    far = facts.value >= _FAR * facts.rows or facts.value <= -_FAR * facts.rows
    if not (facts.lone and far) and abs(facts.value) < _NO_TABLE:
        return None
    return (
        f"{facts.value} is a corrupt value: no table near this size ({facts.rows} rows) has such an index ({facts.evidence}).",
        "Look at the sample where it is stored: a damaged or truncated file, a memory map read with another dtype, or memory that was not initialised. "
        "Mend or drop it.",
    )


def _looks_like_tokens(facts: Facts) -> bool:
    return (
        "input" in facts.name
        or "token" in facts.name
        or "ids" in facts.name
        or facts.tensor.shape[-1:] > torch.Size([3])
        or facts.rows > 1000
    )


def _not_a_probability(facts: Facts) -> tuple[str, str] | None:
    if facts.op != "binary_cross_entropy":
        return None
    return (
        f"The target of binary_cross_entropy is a probability, 0 to 1, and {facts.spoken} holds {facts.value}.",
        "Scale it (a mask of 0 and 255: divide by 255), map the classes to 0 and 1, or use cross_entropy for class ids.",
    )


def _plain(facts: Facts) -> tuple[str, str]:
    value = facts.fact.derived.value if facts.fact.derived is not None else facts.value
    is_past_a_table = facts.op in _LOOKUPS and isinstance(value, int) and value >= 0
    return (
        f"{facts.op} takes values {range_words(facts.bound) if facts.bound is not None else 'in a range'} and gets {value} from {facts.spoken}.",
        f"Correct {facts.spoken} where it is made{f', or give {facts.module or facts.op} a larger table' if is_past_a_table else ''}.",
    )


WRONG_VALUES = (
    *(_declared, _cast_from_nan, _difference, _label_mask_in_inputs, _coordinate, _pad_id, _no_ignore_index),
    *(_void_class, _absurd, _segments, _edges, _spans, _positions, _one_logit, _unknown_label, _from_one),
    *(_head_too_small, _tokens, _not_a_probability, _plain),
)
