"""What the traces taught: the rules, merged over all of them, and what could not be covered. Owns the merging and the self-check.

Knows nothing of modes, numpy or words. A rule enters only where replaying it on the traced batch gives the index that the consumer really got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_watchdog_agent.contract.bounds import BIG, LiveTable
from torch_watchdog_agent.contract.kinds import offending
from torch_watchdog_agent.contract.nodes import LeafRef
from torch_watchdog_agent.contract.recipe import Recipe, agreed, cut, whole_leaf
from torch_watchdog_agent.contract.replay import DOES_NOT_FIT, as_recorded, replayed
from torch_watchdog_agent.contract.rules import LOOKED_AT, TRACES_FOR_DERIVED, Rule
from torch_watchdog_agent.contract.sizes import Shapes, Size, fresh, merged
from torch_watchdog_agent.contract.tape import Site, Tape, sampled
from torch_watchdog_agent.errors import let_through

READ_OFF_DATA = "its limit may depend on data"
MAX_LOOKS = 8
ONE_SHORT = TRACES_FOR_DERIVED - 1
MAX_VARIANTS = 3
MAX_LOST = 3
MAX_RULES = 4096
__all__ = ["Contract", "Lesson", "rule_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One batch of a traced step: its tensors on the CPU as they were at hand-over, and its structure."""

    batch: int
    leaves: Mapping[str, torch.Tensor]
    shapes: Shapes
    structure: Any
    name: str


@dataclass(slots=True)
class Contract:
    """All rules. `version` changes whenever a check may come out differently."""

    rules: dict[Any, Rule] = field(default_factory=dict)
    opaque: dict[tuple[str, str, str | None, str], str] = field(default_factory=dict)
    traces_of: Counter[Any] = field(default_factory=Counter)
    flowed: set[str] = field(default_factory=set)
    handled: set[str] = field(default_factory=set)
    tables: list[LiveTable] = field(default_factory=list)  # those that rules read, each once
    traces: int = 0
    version: int = 0
    _variants: Counter[Any] = field(default_factory=Counter)
    _lost: Counter[Any] = field(default_factory=Counter)  # how often the table of a rule has gone

    def is_outdated(self) -> bool:
        """Whether a table has been rebuilt or resized since it was learned."""
        for table in self.tables:  # noqa: SIM110  asked before each batch
            if table.changed():
                return True
        return False

    def forget_changed(self) -> None:
        """Tables were rebuilt or resized. A trained one: start over. A buffer (positions that a module makes longer): trace once more, for its rules."""
        changed = [table for table in self.tables if table.changed()]
        lost = {key for key, rule in self.rules.items() if rule.live is not None and any(rule.live.same(one) for one in changed)}
        self._lost.update(lost)
        if any(table.trained for table in changed):
            self.rules.clear()
            self.traces_of.clear()
        self.rules = {key: rule for key, rule in self.rules.items() if key not in lost}
        self.traces_of = Counter({structure: min(count, ONE_SHORT) for structure, count in self.traces_of.items()})
        self._note_tables()
        self.version += 1

    def first_consumer(self, key: str) -> Rule | None:
        """The first rule over a tensor of the batch."""
        return min((rule for rule in self.rules.values() if key in rule.recipe.leaves.values()), key=lambda rule: rule.order, default=None)

    def usable(self, structure: Any) -> list[Rule]:
        """The rules that hold for batches of this structure, in the order in which the step meets them."""
        return sorted((rule for rule in self.rules.values() if rule.usable and structure in rule.structures), key=lambda rule: rule.order)

    def learn(self, tape: Tape, lessons: Iterable[Lesson], *, unused: Sequence[Lesson] = (), whole: bool) -> list[Rule]:
        """Take in one traced step; returns the rules that showed up. `whole`: it ran to its end, so that others were not needed. `unused`: of batches that
        nothing has used, in the end: the step shows what others need, and nothing of these."""
        taught = {lesson.batch: lesson for lesson in lessons}
        if not (taught or unused):
            return []
        self.traces += 1
        self.version += 1
        met: list[Rule] = []
        ordinals: Counter[Any] = Counter()
        for site in tape.sites:
            rule = self._met(tape, site, taught, ordinals)
            if rule is not None:
                met.append(rule)
        self.traces_of.update(lesson.structure for lesson in (*taught.values(), *unused))
        for lesson in taught.values() if whole else ():
            self._doubt_absent(lesson, met)
        self._note_flows(tape)
        self._note_tables()
        return met

    def _note_tables(self) -> None:
        self.tables = []
        for rule in self.rules.values():
            if rule.live is not None and rule.usable and not any(rule.live.same(known) for known in self.tables):
                self.tables.append(rule.live)

    def _met(self, tape: Tape, site: Site, taught: Mapping[int, Lesson], ordinals: Counter[Any]) -> Rule | None:
        if site.impure is not None:
            self.opaque[(site.name, site.use.arg, site.place.module, site.place.source)] = site.impure
            return None
        recipe = cut(tape, site, lambda batches: _shapes(taught, batches))
        lesson = _lesson_of(recipe, site, taught)
        if lesson is None:
            return None
        rule = rule_of(tape, site, recipe, lesson, order=len(self.rules))
        key = _key(rule)
        ordinals[(lesson.batch, key)] += 1
        key = (*key, ordinals[(lesson.batch, key)])
        rule.opaque = rule.opaque or self_check(rule, site, lesson)
        return self._merge(key, rule, lesson)

    def _merge(self, key: Any, rule: Rule, lesson: Lesson) -> Rule | None:
        known = self.rules.get(key)
        if known is not None and _limits_clash(known, rule):
            known.doubt = rule.doubt = "its limit differs from step to step"
            self._variants[key] += 1
            if self._variants[key] > MAX_VARIANTS:
                self._give_up(key)
                return None
            key = (*key, "rows", _first(rule.rows))
            known = self.rules.get(key)
        if known is None:
            if len(self.rules) >= MAX_RULES:
                return None
            known = self.rules[key] = rule
            if self._lost[key] >= MAX_LOST:  # a copy of the model that is made anew for each step
                rule.opaque = "its table is another one each time"
        else:
            _narrow(known, rule)
        known.traces += 1
        known.structures.add(lesson.structure)
        return known

    def _give_up(self, key: tuple[Any, ...]) -> None:
        """A limit that is another one each time depends on data: no variant of it is any use."""
        for other, rule in self.rules.items():
            if other[: len(key)] == key:
                rule.opaque = "its limit depends on data"

    def _doubt_absent(self, lesson: Lesson, met: list[Rule]) -> None:
        for rule in self.rules.values():
            if lesson.structure in rule.structures and rule not in met and rule.doubt is None:
                rule.doubt = "not every step needs it"

    def _note_flows(self, tape: Tape) -> None:
        self.flowed |= {key for _, key in tape.flowed}
        self.handled |= {key for _, key in tape.handled}


def _shapes(taught: Mapping[int, Lesson], batches: frozenset[int]) -> Shapes:
    known = [taught[batch].shapes for batch in batches if batch in taught]
    return known[0] if len(known) == 1 else {}


def _lesson_of(recipe: Recipe, site: Site, taught: Mapping[int, Lesson]) -> Lesson | None:
    """The batch that a site belongs to; None where it draws on several (a count over all micro-batches)."""
    if len(recipe.batches) > 1:
        return None
    batch = next(iter(recipe.batches), site.batch)
    if batch is None and len(taught) == 1:  # before anything has read the batch (a table of positions)
        return next(iter(taught.values()))
    return None if batch is None else taught.get(batch)


def rule_of(tape: Tape, site: Site, recipe: Recipe, lesson: Lesson, *, order: int) -> Rule:
    """What one site says by itself."""
    use = site.use
    looks = _looks(tape, site, recipe, lesson)
    rows: Size | int = use.rows if use.fixed or use.rows >= BIG else fresh(use.rows, lesson.shapes)
    return Rule(
        order=order,
        op=site.name,
        arg=use.arg,
        kind=use.kind,
        place=site.place,
        recipe=recipe,
        low=use.low,
        ignored=use.ignored,
        wraps=use.wraps,
        options=use.options,
        rows=rows,
        live=site.live,
        learned_from=lesson.name,
        doubt=READ_OFF_DATA if site.live is None and not site.settled else None if looks == () else LOOKED_AT,
        looks=looks,
        opaque="values from outside the batch that are too large to keep feed it" if recipe.missing else None,
    )


def _looks(tape: Tape, site: Site, recipe: Recipe, lesson: Lesson) -> tuple[Recipe, ...] | None:
    """How the values are computed that the program looks at before this use of the same data; None where one cannot be computed again."""
    mine: set[LeafRef] = {(batch, key) for batch in recipe.batches for key in recipe.leaves.values()}
    found: dict[object, Recipe] = {}
    told: list[int] = []  # numbers that came of earlier looks: the program may use them in later ones
    for read in tape.reads:
        if read.position > site.position or not read.leaves & mine or read.call == site.place.call:
            continue
        look = cut(tape, read, lambda _: lesson.shapes)
        if len(found) >= MAX_LOOKS or look.missing or look.batches != recipe.batches or _holds_any(look, told):
            return None
        found[look.form] = look
        told += [read.value] if read.value is not None else []
    return tuple(found.values())


def _holds_any(look: Recipe, numbers: Sequence[int]) -> bool:
    """Whether one of the numbers is written down in the computation, as a constant of one step that is another in the next."""
    given = [argument for step in look.steps for argument in (*step.args, *step.kwargs.values())]
    return any(type(argument) in (int, float) and argument in numbers for argument in given)


def _key(rule: Rule) -> tuple[Any, ...]:
    options = tuple(sorted((name, str(value)) for name, value in rule.options.items()))
    return (
        rule.op,
        rule.arg,
        rule.kind,
        rule.place.module,
        rule.place.source,
        rule.low,
        rule.ignored,
        rule.wraps,
        options,
        rule.recipe.form,
    )


def self_check(rule: Rule, site: Site, lesson: Lesson) -> str | None:
    """Replay the recipe on the traced batch: it must give the very index that the consumer got, and the batch must be legal."""
    if rule.kind == "spread":
        return None
    if rule.kind == "reach":
        return (
            "a batch that was trained on breaks it"
            if offending(rule.kind, (), rule.allowed(lesson.shapes), rule.options) is not None
            else None
        )
    try:
        values = replayed(rule.recipe, lesson.leaves, as_recorded)
    except DOES_NOT_FIT as error:
        let_through(error)
        return f"it cannot be computed again: {type(error).__name__}"
    again = sampled(values[0])
    if site.sample is None or again.shape != site.sample.shape or not torch.equal(again.to(site.sample.dtype), site.sample):
        return "computing it again gives other values"
    if offending(rule.kind, values, rule.allowed(lesson.shapes), rule.options) is not None:
        return "a batch that was trained on breaks it"
    return None


def _first(rows: Size | int) -> int:
    return rows if isinstance(rows, int) else as_recorded(rows, ())


def _limits_clash(known: Rule, rule: Rule) -> bool:
    if known.live is not None and rule.live is not None:
        return known.live.alive and not known.live.same(rule.live) and known.live.rows() != rule.live.rows()
    if isinstance(known.rows, int) or isinstance(rule.rows, int):
        return known.rows != rule.rows
    return not known.rows.readings & rule.rows.readings


def _fitted(known: Rule, rule: Rule) -> str | None:
    """Keep what fits both computations. Where only their sizes differ, as nobody can foresee, the whole tensor is doubted instead of the part."""
    if known.widened:
        return None
    why = agreed(known.recipe, rule.recipe)
    whole = whole_leaf(known.recipe) if why is not None and known.kind == "range" else None
    if whole is None:
        return why
    known.recipe, known.widened = whole, True
    return None


def _all_looks(known: tuple[Recipe, ...] | None, others: tuple[Recipe, ...] | None) -> tuple[Recipe, ...] | None:
    """What the program looks at in any of the steps."""
    if known is None or others is None:
        return None
    by_form = {look.form: look for look in known}
    for look in others:
        if look.form in by_form and agreed(by_form[look.form], look) is not None:
            return None
        by_form.setdefault(look.form, look)
    return tuple(by_form.values()) if len(by_form) <= MAX_LOOKS else None


def _narrow(known: Rule, rule: Rule) -> None:
    """Keep what fits both."""
    if isinstance(known.rows, Size) and isinstance(rule.rows, Size):
        known.rows = merged(known.rows, rule.rows)
    known.opaque = known.opaque or rule.opaque or _fitted(known, rule)
    if READ_OFF_DATA in (known.doubt, rule.doubt) and None in (known.doubt, rule.doubt):
        known.doubt = None  # in one of the traces the number that was read was another one, and the limit the same
    else:
        known.doubt = known.doubt or rule.doubt
    known.looks = _all_looks(known.looks, rule.looks)
    if known.widened:
        known.doubt = "which of its elements are used cannot be foreseen"
    known.live = rule.live
    known.place = replace(rule.place)
