"""From a finding to a violation in the words of the batch: key, element, value, range, op, module, sample. Causes are in causes.py.

Works on the CPU tensors of the batch, after the failure is certain; nothing here is on the hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_watchdog_agent.contract.bounds import BIG, Range
from torch_watchdog_agent.contract.causes import explained
from torch_watchdog_agent.contract.facts import Facts, tokenizer_sizes, usable_length
from torch_watchdog_agent.contract.findings import Oddity
from torch_watchdog_agent.contract.frames import Place
from torch_watchdog_agent.contract.kinds import copies, counted, ctc_frames_needed
from torch_watchdog_agent.contract.origin import element_ids
from torch_watchdog_agent.contract.plan import Finding
from torch_watchdog_agent.contract.recipe import sizes_in
from torch_watchdog_agent.contract.replay import DOES_NOT_FIT, Resolve
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.contract.sizes import Size
from torch_watchdog_agent.contract.where import Origin, comparable, flat_to_element, lengths_of, value_at
from torch_watchdog_agent.contract.words import beside_the_point, expression
from torch_watchdog_agent.errors import let_through
from torch_watchdog_proto.messages import BatchFact, BoundFact, Derived, Number, Violation

__all__ = ["device_violation", "odd_violation", "plain_violation", "violation_of"]

_KINDS = {
    **dict.fromkeys(("range", "starts"), "batch.index_out_of_range"),
    **dict.fromkeys(("some", "rows"), "batch.empty"),
    **dict.fromkeys(("ctc", "groups", "spread", "count", "agree", "sum", "reach"), "batch.shape"),
    "float": "batch.dtype",
}
_OF_PROBABILITIES = ("binary_cross_entropy", "multinomial")
_COUNTS = ("count", "agree", "sum")


@dataclass(frozen=True, slots=True)
class _Cell:
    key: str
    element: tuple[int, ...] | None
    count: int | None


def violation_of(finding: Finding, origin: Origin, resolve: Resolve, others: Sequence[Finding] = ()) -> Violation:
    """The whole diagnosis of one finding; `others` are further findings about the same batch."""
    rule = finding.rule
    fact = _batch_fact(finding, origin, resolve)
    fact = replace(fact, also=_also(fact, others, origin, resolve))
    kind = _KINDS[rule.kind] if rule.recipe.leaves or rule.kind != "range" else "batch.shape"
    if kind == "batch.index_out_of_range" and rule.op in _OF_PROBABILITIES:  # a target, or a weight: no index
        kind = "probability.out_of_range"
    if rule.kind == "ctc" and fact.derived is None:
        kind = "batch.index_out_of_range"
    return _completed(kind, fact, _bound_fact(finding, fact), origin, rule)


def _completed(kind: str, fact: BatchFact, bound: BoundFact | None, origin: Origin, rule: Rule | None) -> Violation:
    facts = Facts(
        kind=kind,
        fact=fact,
        bound=bound,
        leaves={key: comparable(tensor) for key, tensor in origin.leaves.items()},
        rule=rule,
        past=(origin.past or {}).get(fact.key),
        tokenizer_sizes=tokenizer_sizes,
    )
    explanation = explained(facts)
    return Violation(
        kind=kind,
        summary=explanation.summary,
        cause=explanation.cause,
        fix=explanation.fix,
        batch=fact,
        bound=bound,
        severity="warning" if kind == "batch.size_outlier" else "critical",
        repairable=kind not in ("batch.shape", "batch.size_outlier") or bool(rule is not None and rule.recipe.leaves),
    )


# The cell


def _batch_fact(finding: Finding, origin: Origin, resolve: Resolve) -> BatchFact:
    rule = finding.rule
    if rule.kind in ("spread", "reach") or not rule.recipe.leaves:
        return _size_fact(finding, origin)
    cell, derived = _cell(finding, origin, resolve)
    tensor = origin.leaves[cell.key]
    value: Number = None if cell.element is None or rule.kind in ("some", "float") else value_at(tensor, cell.element)
    if derived is not None and rule.recipe.moves_only and (derived.value == value or value != value):  # NaN is not even NaN
        derived = None
    element = cell.element
    if rule.kind == "rows" and element is not None:
        element = (*element[:-1], 0)
    return BatchFact(
        key=cell.key,
        element=None if rule.kind in ("some", "float") else element,
        value=value,
        count=cell.count,
        **_description(origin, cell.key),
        derived=derived,
        sample=origin.sample(cell.key, element),
    )


def _description(origin: Origin, key: str) -> dict[str, Any]:
    tensor = origin.leaves[key]
    return {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "device": str(origin.device(key))}


def _cell(finding: Finding, origin: Origin, resolve: Resolve) -> tuple[_Cell, Derived | None]:
    rule, mask = finding.rule, finding.mask
    if rule.kind == "float":
        return _Cell(next(iter(rule.recipe.leaves.values())), None, None), None
    if rule.kind in _COUNTS:
        return _Cell(next(iter(rule.recipe.leaves.values())), None, None), _count(finding)
    keys = list(dict.fromkeys(rule.recipe.leaves.values()))
    for key in keys:
        ids = _ids(rule, origin, key, resolve)
        if ids is None or ids.shape != mask.shape or not bool((ids[mask] >= 0).any()):
            continue
        hits = ids[mask & (ids >= 0)]
        first = int(hits.min())
        element = flat_to_element(first, origin.leaves[key].shape)
        count = int(hits.unique().numel()) if rule.recipe.is_direct else int(mask.sum())
        return _Cell(key, element, count), _derived(finding, ids, first, element)
    return _Cell(keys[0], None, int(mask.sum())), _derived(finding, None, 0, None)


def _ids(rule: Rule, origin: Origin, key: str, resolve: Resolve) -> torch.Tensor | None:
    try:
        return element_ids(rule.recipe, origin.leaves, key, resolve)
    except DOES_NOT_FIT as error:
        let_through(error)
        return None


def _derived(finding: Finding, ids: torch.Tensor | None, first: int, element: tuple[int, ...] | None) -> Derived | None:
    rule = finding.rule
    if rule.kind == "ctc":
        return _ctc_frames(finding, element)
    if rule.kind == "groups":
        rows = finding.values[0].flatten(1).sum(1)
        row = element[0] if element else 0
        return Derived(expression=f"count of true cells in row {row} of {expression(rule.recipe)}", value=int(rows[row]))
    if rule.kind == "some":
        return Derived(expression=f"count({expression(rule.recipe)} != {rule.ignored})", value=0)
    if rule.kind == "rows":
        return Derived(expression="cells of the row that are not hidden", value=0)
    where = finding.mask if ids is None else finding.mask & (ids == first)
    return Derived(expression=expression(rule.recipe), value=finding.values[0][where][0].item())


def _count(finding: Finding) -> Derived:
    what = "sum" if finding.rule.kind == "sum" else "count"
    found = counted(finding.rule.kind, finding.values[0])
    return Derived(expression=f"{what}({expression(finding.rule.recipe)})", value=found // _copies(finding))


def _copies(finding: Finding) -> int:
    """A mask that was expanded over the features is counted as it was before."""
    each = copies(finding.values[0]) if finding.rule.kind != "sum" else 1
    return each if each and (int(finding.allowed.high) + 1) % each == 0 else 1


def _ctc_frames(finding: Finding, element: tuple[int, ...] | None) -> Derived | None:
    labels, _, lengths = finding.values
    if labels.dim() != 2 or element is None:
        return None
    row = element[0]
    frames = int(ctc_frames_needed(labels[row : row + 1], lengths[row : row + 1].to(labels.device))[0])
    return (
        Derived(expression=f"labels of row {row} plus repeats of a label", value=frames) if frames > int(finding.values[1][row]) else None
    )


def _size_fact(finding: Finding, origin: Origin) -> BatchFact:
    """A limit on a shape: the tensor whose size is meant, and the sample that is to blame for it."""
    rule = finding.rule
    key, dim = _sized_by(rule, origin)
    tensor, high = origin.leaves[key], finding.allowed.high
    if rule.kind == "spread":
        derived = Derived(expression="values per channel", value=int(high) + 1)
        return BatchFact(key=key, **_description(origin, key), derived=derived, sample=origin.sample(key, (0,)) if tensor.dim() else None)
    if rule.kind == "reach":
        derived, limit = Derived(expression="last position", value=int(high)), int(rule.options["limit"])
        element = _first_past(tensor, key, dim, limit, origin)
        return BatchFact(key=key, element=element, **_description(origin, key), derived=derived, sample=origin.sample(key, element))
    limit, value = _past_the_end(finding, tensor.shape[dim])
    element = _first_past(tensor, key, dim, limit, origin)
    derived = Derived(expression=expression(rule.recipe), value=value)
    sample = origin.sample(key, element)
    return BatchFact(key=key, element=element, count=int(finding.mask.sum()), **_description(origin, key), derived=derived, sample=sample)


def _past_the_end(finding: Finding, length: int) -> tuple[int, int]:
    """The first place along a length whose position is not in the table, and that position."""
    values, mask = finding.values[0], finding.mask
    if values.dim() and values.shape[-1] == length:
        place = int(mask.reshape(-1, length).any(0).nonzero()[0])
        return place, int(values.reshape(-1, length)[:, place][mask.reshape(-1, length)[:, place]][0])
    worst = int(values[mask].min()) if bool((values[mask] < 0).any()) else int(values.max())
    return usable_length(length, worst, int(finding.allowed.high)), worst


def _first_past(tensor: torch.Tensor, key: str, dim: int, limit: int, origin: Origin) -> tuple[int, ...] | None:
    """The first cell past the limit along `dim`, in the first row whose real content goes that far."""
    if tensor.shape[dim] <= limit:
        return None
    if tensor.dim() != 2 or dim != 1:
        return tuple(limit if place == dim else 0 for place in range(tensor.dim()))
    rows, columns = tensor.shape
    lengths = lengths_of(origin.leaves, rows, columns, key) or [columns] * rows
    row = next((place for place, length in enumerate(lengths) if length > limit), 0)
    return row, limit


def _sized_by(rule: Rule, origin: Origin) -> tuple[str, int]:
    """The tensor and dimension that a size is read from: the plainest reading, in the order of the batch."""
    sizes: list[Size] = [size for step in rule.recipe.steps for argument in step.args for size in sizes_in(argument)]
    sizes += [rule.rows] if isinstance(rule.rows, Size) and not sizes else []
    order = {key: place for place, key in enumerate(origin.leaves)}
    readings = [reading for size in sizes for reading in size.readings if reading[0] == "size" and reading[1] in order]
    plainest = sorted(readings, key=lambda one: (abs(one[3]), _rank(rule, one), beside_the_point(one[1]), order[one[1]], one[2]))
    if plainest:
        return plainest[0][1], plainest[0][2]
    return next(iter(origin.leaves)), 0


def _rank(rule: Rule, reading: tuple[Any, ...]) -> int:
    """Lengths before batch sizes for positions; batch sizes first for normalisation."""
    return int(reading[2] != 0) if rule.kind == "spread" else int(reading[2] == 0)


# The bound


def _bound_fact(finding: Finding, fact: BatchFact) -> BoundFact:
    rule, allowed = finding.rule, finding.allowed
    low: Number = allowed.low
    high: Number = None if allowed.high >= BIG else allowed.high
    if rule.kind in ("some", "rows", "spread"):
        low, high = (2, None) if rule.kind == "spread" else (1, None)
    elif rule.kind in ("float", "groups"):
        low, high = None, None
    elif rule.kind in _COUNTS:
        high = (int(allowed.high) + 1) // _copies(finding)
        low = high if rule.kind != "count" or rule.options["exact"] else 0
    elif rule.kind == "reach":
        low, high = 0, int(rule.options["limit"]) - 1
    elif rule.kind == "starts":
        low, high = _neighbours(finding, fact)
    elif rule.kind == "ctc" and fact.derived is not None and fact.element is not None:
        low, high = 0, int(finding.values[1][fact.element[0]])
    elif not rule.recipe.leaves:
        low = max(int(allowed.low), 0)  # a position is not negative
    return BoundFact(
        low=low,
        high=high,
        ignored=() if allowed.ignored is None or rule.kind != "range" else (allowed.ignored,),
        op=rule.op,
        module=rule.place.module,
        source=rule.place.source,
        learned_from=rule.learned_from,
    )


def _neighbours(finding: Finding, fact: BatchFact) -> tuple[int, int | None]:
    """What an offset could have been: 0 the first, and no less than the one before it any other."""
    place = fact.element[-1] if fact.element else 0
    return (0, 0) if place == 0 else (int(finding.values[0].reshape(-1)[place - 1]), None)


def _also(fact: BatchFact, others: Sequence[Finding], origin: Origin, resolve: Resolve) -> tuple[dict[str, Any], ...]:
    """Other tensors that hold the same value in the same cell: one cause."""
    found: dict[str, dict[str, Any]] = {}
    for other in others:
        if not other.rule.recipe.leaves or other.rule.kind != "range":
            continue
        cell, _ = _cell(other, origin, resolve)
        if cell.key != fact.key and cell.element == fact.element and cell.element is not None:
            value = value_at(origin.leaves[cell.key], cell.element)
            if value == fact.value:
                found[cell.key] = {"key": cell.key, "element": list(cell.element), "value": value, "count": cell.count}
    return tuple(found.values())


# Without a trace


def odd_violation(oddity: Oddity, origin: Origin, rule: Rule | None) -> Violation:
    """The diagnosis of a tensor that is not as it always was; `rule` is its first consumer, if it has one."""
    tensor = origin.leaves[oddity.key]
    fact = BatchFact(key=oddity.key, **_description(origin, oddity.key))
    if oddity.kind == "batch.not_finite":
        fact = _not_finite_fact(fact, tensor, origin)
    elif oddity.kind == "batch.size_outlier":
        fact = _outlier_fact(fact, tensor, origin)
    learned_from = f"always {oddity.usual} so far" if oddity.usual else rule.learned_from if rule is not None else ""
    bound = None if rule is None else BoundFact(op=rule.op, module=rule.place.module, source=rule.place.source, learned_from=learned_from)
    if oddity.kind == "batch.size_outlier":
        bound = BoundFact(low=0, high=oddity.largest, op="memory", learned_from="the largest batch so far")
    if bound is None and oddity.usual:
        bound = BoundFact(op="", learned_from=learned_from)
    return _completed(oddity.kind, fact, bound, origin, rule)


def _not_finite_fact(fact: BatchFact, tensor: torch.Tensor, origin: Origin) -> BatchFact:
    bad = ~torch.isfinite(tensor)
    element = flat_to_element(int(bad.reshape(-1).nonzero()[0]), tensor.shape)
    value = str(float(tensor[element]))
    return replace(fact, element=element, value=value, count=int(bad.sum()), sample=origin.sample(fact.key, element))


def _outlier_fact(fact: BatchFact, tensor: torch.Tensor, origin: Origin) -> BatchFact:
    derived = Derived(expression="elements", value=tensor.numel())
    if tensor.dim() != 2:
        return replace(fact, derived=derived)
    rows, columns = tensor.shape
    lengths = lengths_of(origin.leaves, rows, columns, fact.key) or [columns] * rows
    row = max(range(rows), key=lengths.__getitem__)
    return replace(fact, derived=derived, sample=origin.sample(fact.key, (row,)))


def device_violation(rule: Rule, origin: Origin, index: torch.Tensor, table: torch.Tensor) -> Violation:
    """An index on another device than the table that it goes into."""
    key = next(iter(rule.recipe.leaves.values()))
    fact = replace(BatchFact(key=key, **_description(origin, key)), device=str(index.device))
    bound = BoundFact(op=rule.op, module=rule.place.module, source=rule.place.source, learned_from=f"always {table.device} so far")
    return _completed("batch.device", fact, bound, origin, rule)


def plain_violation(op: str, place: Place, value: int, allowed: Range) -> Violation:
    """An index that comes from the model itself."""
    return Violation(
        kind="batch.index_out_of_range",
        summary=f"an index made by the model is {value}, allowed {allowed.words()} in {op} ({place.module or place.source})",
        cause="The index is an output of the model (or drawn at random), not a value of the batch.",
        fix="Clamp the index, or look at the layer that makes it: values that are not finite become garbage indices.",
        batch=BatchFact(key="(made by the model)", value=value),
        bound=BoundFact(low=allowed.low, high=allowed.high, op=op, module=place.module, source=place.source),
        repairable=False,
    )
