"""One traced step: the mode that records it, the batches in flight on it, and the refusal of an op that a batch would break.

Owns when the mode is pushed and popped. Several batches may be in flight (prefetching, accumulation); a batch that nothing used yet waits for
the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_watchdog_agent.contract.aftermath import is_of_the_forward, not_probabilities, suspected
from torch_watchdog_agent.contract.bounds import BIG, Range
from torch_watchdog_agent.contract.calls import Call
from torch_watchdog_agent.contract.consumers import Use
from torch_watchdog_agent.contract.conversions import Source
from torch_watchdog_agent.contract.explain import device_violation, plain_violation, violation_of
from torch_watchdog_agent.contract.frames import ModuleNames
from torch_watchdog_agent.contract.kinds import offending
from torch_watchdog_agent.contract.learn import Contract, Lesson, rule_of
from torch_watchdog_agent.contract.mode import TraceMode, without_modes
from torch_watchdog_agent.contract.plan import Finding
from torch_watchdog_agent.contract.recipe import Recipe, cut
from torch_watchdog_agent.contract.replay import DOES_NOT_FIT, as_recorded, replayed
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.contract.tape import Site, Tape
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_agent.errors import BadBatchError, let_through
from torch_watchdog_proto.messages import Violation

__all__ = ["Flight", "Tracer"]

MAX_WAITS = 2


@dataclass(slots=True, kw_only=True)
class Flight:
    """A batch that was handed over while a step is traced, which is to settle the alarms of `suspects` and the readings of `unsettled`.

    `sources`: its arrays and lists. `waits`: for how many steps nothing has read it.
    """

    lesson: Lesson
    origin: Origin
    tensors: Mapping[str, torch.Tensor]
    sources: Sequence[Source] = ()
    suspects: Sequence[Rule] = ()
    unsettled: Sequence[Rule] = ()
    waits: int = 0


@dataclass(slots=True)
class Tracer:
    """Traces steps into a contract. `on_refused` is told of a violation right before BadBatchError is raised; False lets the operator run.

    `on_noticed` is told of a warning, once for each line of the program. `lists` gets the paths of lists that the program makes tensors of.
    """

    names: ModuleNames
    contract: Contract
    on_refused: Callable[[Violation], bool | None]
    on_noticed: Callable[[Violation], None]
    lists: set[str] = field(default_factory=set)
    mode: TraceMode | None = None
    _call: Call | None = None
    flights: dict[int, Flight] = field(default_factory=dict)
    ahead: int | None = None  # batches in hand, at the newest traced gate, that came after the newest one in use
    _newest_used: int = -1
    _has_trained: bool = False  # on a batch in flight, since the last traced gate: what nothing has used tells nothing of the loop
    _noticed: set[str] = field(default_factory=set)
    _is_due: bool = False  # a gate has been passed where the trace could not end

    @property
    def call(self) -> Call | None:
        """How the loop called its model in the newest traced step."""
        return self._call if self.mode is None or self.mode.call is None else self.mode.call

    def start(self) -> bool:
        """Trace from here on; False where another dispatch mode is at work."""
        if self.mode is None:
            mode = TraceMode(Tape(self.names), self.examine, self._notice)
            if not mode.push():
                return False
            self.mode = mode
        return True

    def end_if_used(self) -> None:
        """A further batch comes: what was traced so far is complete where every batch in flight has been used, or a step has ended."""
        if self.mode is not None and self._is_due:
            self.end_at_gate()
        elif self.mode is not None and self.flights and all(number in self.mode.tape.used for number in self.flights):
            self.end()

    def enter(self, flight: Flight) -> None:
        """Tag the tensors of a batch that the loop gets now."""
        if self.mode is not None:
            self.flights[flight.lesson.batch] = flight
            for key, tensor in flight.tensors.items():
                self.mode.tape.tag(flight.lesson.batch, key, tensor)
            self.mode.tape.conversions.sources += flight.sources

    def end(self) -> bool:
        """The step is over: learn from it. False where another mode was pushed over ours and the end must wait."""
        mode = self.mode
        if mode is None:
            return True
        if not mode.pop():
            return False
        self.mode, self._call, self._is_due = None, self.call, False
        self._newest_used = max((number for number in self.flights if number in mode.tape.used), default=self._newest_used)
        self._has_trained |= mode.saw_backward and not mode.tape.used.isdisjoint(self.flights)
        done = {number: flight for number, flight in self.flights.items() if number in mode.tape.touched or flight.waits >= MAX_WAITS}
        waiting = [flight for number, flight in self.flights.items() if number not in done]
        self.flights = {}
        if mode.failure is not None:
            raise mode.failure
        self.lists |= mode.tape.conversions.unheeded
        if not mode.refused:
            with without_modes():
                if not mode.spoiled:
                    self._learn(mode.tape, done, whole=mode.saw_backward and not mode.full)
            self._wait(waiting)
        return True

    def end_at_gate(self, drains: bool = False) -> None:
        """The step is over. A loop that prefetches has batches in hand that only a later step will use; `drains`: but for the last ones of its pass."""
        if torch._C._current_graph_task_id() != -1:
            self._is_due = True  # an optimizer that steps inside backward: autograd would bring a mode back that leaves here
            return
        numbers = tuple(self.flights)
        if self.end() and self._has_trained:
            self._has_trained = False
            if not drains:
                self.ahead = sum(number > self._newest_used for number in numbers)

    def abandon(self) -> None:
        """Stop tracing and forget what is in flight."""
        if self.mode is not None:
            self.mode.refused = True  # it may be under another mode for a while: let it do nothing
            self.mode.pop()
        self.mode, self.flights = None, {}

    def _learn(self, tape: Tape, done: Mapping[int, Flight], *, whole: bool) -> None:
        used, unused = (
            [flight.lesson for number, flight in done.items() if (number in tape.touched) is is_used] for is_used in (True, False)
        )
        met = self.contract.learn(tape, used, unused=unused, whole=whole)
        for flight in done.values():
            for rule in flight.suspects:
                if whole or rule in met:
                    rule.not_confirmed(flight.lesson.batch)
            for rule in flight.unsettled:
                rule.not_settled(met=rule in met or not whole)

    def _wait(self, flights: Sequence[Flight]) -> None:
        """Batches that nothing has read yet are traced in the step to come, a few times."""
        if flights and self.start():
            for flight in flights:
                flight.waits += 1
                self.enter(flight)

    def diagnosed(self, error: BaseException) -> Violation | None:
        """Names the batch behind an exception that the traced step has raised, where a rule already had a doubt about it."""
        if not is_of_the_forward(error) or isinstance(error, BadBatchError):
            return None
        for flight in self.flights.values():
            found = suspected(flight.suspects, flight.unsettled, flight.origin, flight.lesson.shapes, error)
            if found is not None:
                return violation_of(found[0], flight.origin, found[1])
        return None

    def _notice(self, warning: Violation) -> None:
        source = warning.bound.source if warning.bound is not None and warning.bound.source is not None else ""
        if source not in self._noticed:
            self._noticed.add(source)
            self.on_noticed(warning)

    # Before an operator is launched

    def examine(self, site: Site, tensors: Sequence[torch.Tensor], table: torch.Tensor | None) -> None:
        """Judge one use; raises BadBatchError where the operator must not run."""
        use = site.use
        if site.impure is not None and not any(tensor.is_cuda for tensor in tensors):
            return  # not the batch's doing, and the CPU says so by itself
        if _on_other_device(use, tensors, table):
            self._refuse_device(site, tensors[0], table)
        if use.kind in ("spread", "groups", "agree", "reach") or any(tensor.device.type == "meta" for tensor in tensors):
            return  # the framework raises by itself; nothing can be read
        if use.kind in ("some", "rows") and not torch.is_grad_enabled():
            return
        allowed = _allowed(use)
        mask = offending(use.kind, tensors, allowed, use.options)
        if mask is not None:
            self._refuse(site, tensors, allowed, mask)

    def _refuse(self, site: Site, tensors: Sequence[torch.Tensor], allowed: Range, mask: torch.Tensor) -> None:
        flight, rule = self._blamed(site)
        if flight is None or rule is None:
            if site.use.kind == "range" and tensors[0].is_cuda:
                self._raise(_made_by_the_model(site, tensors[0], mask, allowed))
            return
        values = self._again(rule.recipe, flight) or tuple(tensor.detach().cpu() for tensor in tensors)
        finding = Finding(rule=rule, allowed=allowed, values=values, mask=mask.cpu())
        self._raise(violation_of(finding, flight.origin, as_recorded))

    def _again(self, recipe: Recipe, flight: Flight) -> tuple[torch.Tensor, ...] | None:
        try:
            return replayed(recipe, flight.lesson.leaves, as_recorded)
        except DOES_NOT_FIT as error:
            let_through(error)
            return None

    def _refuse_device(self, site: Site, index: torch.Tensor, table: torch.Tensor | None) -> None:
        flight, rule = self._blamed(site)
        if flight is not None and rule is not None and rule.recipe.leaves and table is not None:
            self._raise(device_violation(rule, flight.origin, index, table))

    def _blamed(self, site: Site) -> tuple[Flight | None, Rule | None]:
        """The batch that a site draws on, and what the site says as a rule of its own."""
        if self.mode is None:
            return None, None
        lessons = {number: flight.lesson for number, flight in self.flights.items()}
        recipe = cut(self.mode.tape, site, lambda batches: next((lessons[b].shapes for b in batches if b in lessons), {}))
        number = next(iter(recipe.batches), site.batch) if len(recipe.batches) <= 1 else None
        flight = self.flights.get(number) if number is not None else None
        if flight is None:
            return None, None
        return flight, rule_of(self.mode.tape, site, recipe, flight.lesson, order=0)

    def _raise(self, violation: Violation) -> None:
        if self.on_refused(violation) is False:
            if self.mode is not None:
                self.mode.spoiled = True
            return  # only observed: the operator says itself what it thinks of the index
        if self.mode is not None:
            self.mode.refused = True
        raise BadBatchError(violation)


def _made_by_the_model(site: Site, values: torch.Tensor, mask: torch.Tensor, allowed: Range) -> Violation:
    if values.is_floating_point():
        return not_probabilities(site.name, values, site.place.source)
    return plain_violation(site.name, site.place, int(values[mask][0]), allowed)


def _allowed(use: Use) -> Range:
    return Range(low=-use.rows if use.wraps else use.low, high=BIG if use.rows >= BIG else use.rows - 1, ignored=use.ignored)


def _on_other_device(use: Use, tensors: Sequence[torch.Tensor], table: torch.Tensor | None) -> bool:
    if table is None or not tensors or tensors[0].device == table.device:
        return False
    if "meta" in (tensors[0].device.type, table.device.type):
        return True
    return not use.any_device and tensors[0].dim() > 0
