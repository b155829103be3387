"""The guard: checks every batch before the model sees it, and learns what to check from traced steps of the user's own loop.

Owns the life of a batch (fetched, handed over, stepped), and the promise that a failure of ours never fails a training: the first one turns
the guard off. Everything runs on the training thread. How things are checked, learned and said is in the other modules of this package.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from torch_watchdog_agent.contract.aftermath import probability_violation
from torch_watchdog_agent.contract.check import UNREAD, Extremes, extremes
from torch_watchdog_agent.contract.checked import Checked, UnderCheck
from torch_watchdog_agent.contract.conversions import sources_of
from torch_watchdog_agent.contract.declared import declared_rules
from torch_watchdog_agent.contract.findings import Oddity, Seen
from torch_watchdog_agent.contract.flatten import leaves_of, renumbered, replaced, taken_apart
from torch_watchdog_agent.contract.frames import ModuleNames
from torch_watchdog_agent.contract.inside import ModuleWatch, not_finite_inside
from torch_watchdog_agent.contract.learn import Contract
from torch_watchdog_agent.contract.mailbox import Mailbox
from torch_watchdog_agent.contract.misfit import misfit
from torch_watchdog_agent.contract.mode import USUAL, Standing, compiled_code_in_the_way, modes_on_stack, without_modes
from torch_watchdog_agent.contract.ondevice import Finite, Look, Part
from torch_watchdog_agent.contract.plan import Finding, plan_for
from torch_watchdog_agent.contract.plans import MAX_PLANS, Plans
from torch_watchdog_agent.contract.reading import is_on_device, lesson_of, read
from torch_watchdog_agent.contract.ready import Readies
from torch_watchdog_agent.contract.repair import cut_lengths, legal_stand_in
from torch_watchdog_agent.contract.replay import resolver
from torch_watchdog_agent.contract.rules import TRACES_FOR_DERIVED, Rule
from torch_watchdog_agent.contract.signature import Scalars, Signature, shapes_of, signature_of, structure_of
from torch_watchdog_agent.contract.table import as_table
from torch_watchdog_agent.contract.tracing import Flight, Tracer
from torch_watchdog_agent.contract.verdict import verdict
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_agent.errors import BadBatchError, of_a_signal
from torch_watchdog_proto.messages import Violation

__all__ = ["Checked", "Guard", "UnderCheck"]

Result = TypeVar("Result")


class Guard:
    """See the module. `say` prints a line for the user. `on_refused` is told of a violation before BadBatchError is raised; False lets the op run;
    `on_noticed` of a warning that a traced step gives rise to.

    `patient`: reading may wait for its device at any time (a scan). `watch_modules`: look at every module's output. `outlier_times`: as large as the
    largest batch so far, and one is told of.
    `is_elsewhere` and `mailbox` are the device, for tests without one.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        on_refused: Callable[[Violation], bool | None],
        on_noticed: Callable[[Violation], None] = lambda _: None,
        patient: bool = False,
        watch_modules: bool = False,
        outlier_times: float = 10.0,
        is_elsewhere: Callable[[torch.Tensor], bool] = is_on_device,
        mailbox: Mailbox | None = None,
    ) -> None:
        self._say, self._patient, self._is_elsewhere, self._mailbox = say, patient, is_elsewhere, mailbox or Mailbox()
        self._names, self._contract, self._seen, self._scalars = ModuleNames(), Contract(), Seen(outlier_times=outlier_times), Scalars()
        self._tracer = Tracer(self._names, self._contract, on_refused, on_noticed, self._seen.lists)
        self._plans = Plans(self._contract)
        self._usual: dict[tuple[Signature, frozenset[str]], Checked] = {}
        self._readies = Readies()
        self._watch = ModuleWatch(self._names) if watch_modules else None
        self._batches = 0
        self._one_at_a_time = threading.RLock()  # a prefetcher looks at batches in a thread of its own
        self.handed: Origin | None = None  # the newest batch that the loop got
        self._batch: object = None
        self._off = False
        self._told_version = 0
        self._said: set[str] = set()

    def fetched(self, batch: object, *, indices: Sequence[int | None] | None, worker: int | None) -> Checked:
        """Check a batch that has just left a DataLoader. Never changes it."""
        self._batches += 1
        if self._off:
            return Checked(batch_id=self._batches)
        before = USUAL if torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack() else Standing()
        try:  # as _guarded does, with a call less
            with self._one_at_a_time:
                return self._check(batch, indices, worker)
        except BaseException as error:  # noqa: BLE001
            self._failed(error, before)
            return Checked(batch_id=self._batches)

    def handed_over(self, checked: Checked, batch: object) -> None:
        """The loop gets `batch` now (it may have been moved to another device): trace the step if it must be."""
        self.handed, self._batch = checked.origin, batch
        if self._seen.waiting:
            self._seen.handed_over(checked.batch_id)
        if checked.needs_trace or self._tracer.mode is not None or checked.version != self._contract.version:
            self._guarded(None, self._hand_over, checked, batch)

    def fresh(self, checked: Checked) -> Checked:
        """The same batch judged by what was learned since it was fetched (loops that fetch ahead)."""
        return checked if checked.version == self._contract.version else self._guarded(checked, self._judged_again, checked)

    @property
    def tracing(self) -> bool:
        """Whether the step at hand is a traced one: what is fetched meanwhile must not land on its tape."""
        return self._tracer.mode is not None

    @property
    def ahead(self) -> int | None:
        """How many batches ahead of its step the loop fetches, as the newest traced step has shown; None where none has."""
        return self._tracer.ahead

    def diagnose(self, error: BaseException) -> Violation | None:
        """What is behind an exception that ends the training: a batch that a rule had doubted, or logits taken for probabilities."""
        return self._guarded(None, self._diagnose, error)

    def not_finite_inside(self) -> Violation | None:
        """The loss of the newest batch is not finite: where in the model that began. Runs its forward once more; the caller keeps the generators."""
        return self._guarded(None, self._look_inside)

    def loss_is_finite(self) -> None:
        """The newest loss is a number."""
        if self._watch is not None:
            self._watch.forget()

    def step_ended(self, *, drains: bool = False) -> None:
        """The step's forward and backward are done: learn from it. Idempotent; costs nothing where nothing was traced. `drains`: the loader has ended."""
        self.handed = self._batch = None
        if self._seen.waiting:
            self._seen.step_ended()
        if self._tracer.mode is not None:
            self._guarded(None, self._tracer.end_at_gate, drains)

    def started(self, checked: Checked, batch: object, *, change: bool) -> tuple[object, UnderCheck | None]:
        """Starts the checks of what is on a device. Returns the batch that the loop should get: with `change` its values are legal whatever they were."""
        if not checked.on_device.looks:
            return batch, None
        nothing: tuple[object, UnderCheck | None] = batch, None
        return self._guarded(nothing, self._start, checked, batch, change)

    def said_of(self, under_check: UnderCheck) -> Violation | None:
        """What a device has said of a batch, in full: where it found something the batch as it was is read now."""
        return self._guarded(None, self._said_of, under_check)

    def repaired(self, batch: object, checked: Checked) -> object | None:
        """A copy of the batch that the model can take, or None where no value makes it so."""
        return self._guarded(None, self._repair, batch, checked)

    def model_seen(self, module: torch.nn.Module) -> None:
        """A model (wrapped or not), for the names of its modules."""
        self._guarded(None, self._names.learn, module)

    def has_learned(self) -> bool:
        """Whether the contract has changed since this was asked last."""
        before, self._told_version = self._told_version, self._contract.version
        return before != self._told_version

    def contract(self) -> dict[str, object]:
        """All that is guarded and all that is not, JSON-able."""
        return self._guarded({"traces": 0, "guarded": [], "opaque": []}, as_table, self._contract, self._plans.uncovered)

    # Fail open

    def _guarded(self, otherwise: Result, body: Callable[..., Result], *args: Any) -> Result:
        if self._off:
            return otherwise
        before = USUAL if torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack() else Standing()
        try:
            with self._one_at_a_time:
                return body(*args)
        except BaseException as error:  # noqa: BLE001
            self._failed(error, before)
            return otherwise

    def _failed(self, error: BaseException, before: Standing) -> None:
        if isinstance(error, BadBatchError):
            raise error
        if is_own := not isinstance(error, Exception) or of_a_signal(error):  # the script's
            before.put_back(self._tracer.mode)
        self._tracer.abandon()
        if is_own:
            raise error
        self._off = True
        self._plans.forget()
        self._say(f"the batch guard turned itself off, the training goes on unguarded ({type(error).__name__}: {error})")

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(what)

    # Checking

    def _check(self, batch: object, indices: Sequence[int | None] | None, worker: int | None) -> Checked:
        training = self._names.training()
        if not (torch._C._len_torch_dispatch_stack() or self._contract.is_outdated()):
            like_before = self._readies.checked(batch, training, self._plans.version, self._batches, indices, worker)
            if like_before is not None:
                self._seen.batches += 1
                return like_before
        apart = taken_apart(batch, self._seen)
        own, scalars, forms = apart.leaves, apart.scalars, apart.forms
        telling = self._scalars.telling(scalars) if scalars else ()
        leaves, elsewhere = own, frozenset([key for key, tensor in own.items() if self._is_elsewhere(tensor)])
        signature = signature_of(leaves, training, telling)
        if elsewhere and self._must_read(signature, leaves, elsewhere):
            leaves, elsewhere = read(own, elsewhere)
            signature = signature_of(leaves, training, telling)
        origin = Origin(leaves=leaves, indices=indices, worker=worker, own=own, forms=forms, teaches=apart.holds_numbers)
        usual = self._usual.get((signature, elsewhere)) if elsewhere else None
        if usual is not None and usual.version == self._plans.version:
            return Checked(
                batch_id=self._batches, leaves=own, stats=usual.stats, origin=origin, signature=signature, version=usual.version,
                legal=usual.legal, elsewhere=elsewhere, on_device=usual.on_device, seen=usual.seen, is_usual=True,
            )  # fmt: skip
        with without_modes():
            checked, seen, news = self._judged(self._batches, signature, origin, elsewhere)
        if not checked.on_device.looks:
            if checked.violation is None and (checked.needs_trace or checked.oddities):  # it may turn out to be bad
                self._seen.wait(self._batches, news, leaves, seen, forms)
            elif checked.violation is None:
                self._seen.took(news, leaves, seen, forms)
            if not (elsewhere or checked.needs_trace or checked.violation or checked.warnings):
                with without_modes():  # the batch before may be on its tape still, and these tensors are not yet
                    self._readies.prepare(batch, checked, self._plans.of(signature, leaves, elsewhere)[0], self._seen.past_of)
        elif len(elsewhere) == len(leaves) and not (news or checked.needs_trace or checked.violation or checked.warnings):
            if len(self._usual) >= MAX_PLANS:
                self._usual.clear()
            self._usual[signature, elsewhere] = checked  # the next one of this signature has nothing to tell before the device has looked
        return checked

    def _must_read(self, signature: Signature, leaves: Mapping[str, torch.Tensor], elsewhere: frozenset[str]) -> bool:
        """Whether this batch's step is a traced one in any case: that waits for the device, too."""
        if self._patient:
            return True
        if compiled_code_in_the_way():
            return False  # nothing is learned
        if self._contract.traces_of[structure_of(signature)] < TRACES_FOR_DERIVED:
            return True
        plan, _ = self._plans.of(signature, leaves, elsewhere)
        return bool(plan.unsettled or plan.broken)

    def _judged(
        self, number: int, signature: Signature, origin: Origin, elsewhere: frozenset[str]
    ) -> tuple[Checked, dict[str, Extremes], list[str]]:
        leaves = origin.leaves
        plan, on_device = self._plans.of(signature, leaves, elsewhere)
        seen = {key: UNREAD if key in elsewhere else extremes(tensor, plan.ignored.get(key, -100)) for key, tensor in leaves.items()}
        findings, failed = plan.findings(leaves, seen)
        news = self._seen.news(leaves, seen, origin.forms)
        if news and origin.past is None:  # judged again, the batch itself may be part of the past
            origin.past = {key: past for key in news if (past := self._seen.past_of(key)) is not None}
        oddities = self._seen.oddities(news, leaves, seen, origin.forms)
        origin.reformed = origin.reformed or {odd.key: odd.form for odd in oddities if odd.kind == "batch.form"}
        origin.retyped = origin.retyped or {odd.key: odd.usual for odd in oddities if odd.kind == "batch.dtype"}
        origin.unfit, origin.lacks = origin.unfit or self._seen.fits.unfit(leaves), origin.lacks or self._seen.fits.lacks(leaves)
        legal = functools.cache(lambda: self._legal(structure_of(signature), leaves, oddities))
        violation, warnings = verdict(self._contract, findings, oddities, origin, legal) if findings or oddities else (None, ())
        untaught = self._contract.traces_of[structure_of(signature)] < TRACES_FOR_DERIVED
        checked = Checked(
            batch_id=number, leaves=origin.own, stats=tuple(seen[key].stat(key, tensor) for key, tensor in leaves.items()),
            violation=violation, warnings=warnings,
            needs_trace=origin.teaches and bool(untaught or findings or failed or plan.unsettled or plan.broken),
            origin=origin, signature=signature, version=self._plans.version, suspects=tuple(finding.rule for finding in findings),
            unsettled=(*plan.unsettled, *plan.broken), oddities=tuple(oddities), legal=plan.legal, elsewhere=elsewhere, on_device=on_device,
            seen=seen,
        )  # fmt: skip
        return checked, seen, news

    # What is on a device

    def _is_expected(self, look: Look) -> bool:
        """NaN and infinities that the training lives with."""
        return isinstance(look, Finite) and self._seen.expects_not_finite(look.key)

    def _start(self, checked: Checked, batch: object, change: bool) -> tuple[object, UnderCheck | None]:
        trained = [key for key, tensor in checked.leaves.items() if tensor.requires_grad]
        if trained or modes_on_stack() or torch.is_inference_mode_enabled():
            with without_modes(), torch.inference_mode(False):
                sent = checked.on_device.sent(checked.leaves, self._mailbox)
        else:
            sent = checked.on_device.sent(checked.leaves, self._mailbox)
        under_check = UnderCheck(checked=checked, sent=sent)
        legal = {key: tensor for key, tensor in sent.made.items() if key not in trained} if trained else sent.made
        if not (change and legal):
            return batch, under_check
        try:
            return replaced(batch, legal), under_check
        except Exception as error:  # a container of the user's own that cannot be made again
            if of_a_signal(error):
                raise
            self._say_once(
                f"{type(batch).__name__} cannot be copied ({type(error).__name__}: {error}): "
                "a bad value in a batch that is on a GPU already is named, but not kept from the model"
            )
            return batch, under_check

    def _said_of(self, under_check: UnderCheck) -> Violation | None:
        checked, sent = under_check.checked, under_check.sent
        if checked.origin is None:
            return None
        answers = checked.on_device.answers(sent)
        if not any(one.is_broken(numbers) and not self._is_expected(one) for one, numbers in answers):
            whole = {one.key: numbers for one, numbers in answers if isinstance(one, Part) and not one.slot[1].is_floating_point}
            if checked.is_usual:
                self._seen.took_usual([(key, int(numbers[0]), int(numbers[1])) for key, numbers in whole.items()])
                return None
            seen = {**(checked.seen or {}), **{key: Extremes(None, int(numbers[0]), int(numbers[1])) for key, numbers in whole.items()}}
            forms = checked.origin.forms
            self._seen.took(self._seen.news(checked.leaves, seen, forms), checked.leaves, seen, forms)
            return None
        with without_modes():
            leaves, elsewhere = read({**checked.origin.leaves, **sent.kept}, checked.elsewhere)
            signature = (signature_of(leaves, frozenset(), ())[0], *checked.signature[1:])
            again, seen, news = self._judged(checked.batch_id, signature, replace(checked.origin, leaves=leaves), elsewhere)
            if again.violation is None:
                self._seen.took(news, leaves, seen, checked.origin.forms)
        return again.violation

    # Tracing and repair

    def _look_inside(self) -> Violation | None:
        call, origin = self._tracer.call, self.handed
        if self._watch and (watched := self._watch.found(origin)):
            return watched
        if call is None or origin is None:
            return None
        with without_modes():
            return not_finite_inside(call, origin)

    def _judged_again(self, checked: Checked) -> Checked:
        if checked.origin is None or checked.version == self._plans.version:
            return checked
        with without_modes():
            again = self._judged(checked.batch_id, checked.signature, checked.origin, checked.elsewhere)[0]
        if again.violation is not None:
            self._seen.waiting.pop(checked.batch_id, None)
        return replace(again, warnings=tuple(dict.fromkeys((*checked.warnings, *again.warnings)))) if checked.warnings else again

    def _hand_over(self, checked: Checked, batch: object) -> None:
        checked = self._judged_again(checked)
        if checked.origin is None or not (self.tracing or checked.needs_trace):
            return
        if compiled_code_in_the_way():
            self._say_once(
                f"torch {torch.__version__} cannot set compiled code aside while bounds are learned (2.6 can): none are, no index is checked"
            )
            return
        self._tracer.end_if_used()
        checked = self._judged_again(checked)
        if checked.origin is None or not (self.tracing or checked.needs_trace):
            return
        with without_modes():
            leaves = checked.origin.leaves
            lesson = lesson_of(checked.batch_id, leaves, structure_of(checked.signature))
        if self._tracer.start():
            origin = replace(checked.origin, leaves={**checked.origin.leaves, **lesson.leaves}) if checked.elsewhere else checked.origin
            with without_modes():
                tensors, sources = sources_of(batch, self._seen)
            self._tracer.enter(
                Flight(
                    lesson=lesson, origin=origin, tensors=tensors, sources=sources, suspects=checked.suspects, unsettled=checked.unsettled
                )
            )

    def _diagnose(self, error: BaseException) -> Violation | None:
        with without_modes():
            found = self._tracer.diagnosed(error) or probability_violation(error)
            return misfit(error, self.handed, self._batch) if found is None and self.handed is not None else found

    def _repair(self, batch: object, checked: Checked) -> object | None:
        with without_modes():
            return self._stand_in(batch, checked)

    def _stand_in(self, batch: object, checked: Checked) -> object | None:
        leaves = checked.origin.leaves if checked.origin is not None else checked.leaves
        legal = self._legal(structure_of(checked.signature), leaves, checked.oddities)
        if legal is None:
            return None
        own: Any = leaves_of(batch, legal)
        moved = {key: tensor.to(own[key].device) if own[key].device.type != "meta" else tensor for key, tensor in legal.items()}
        stand_in = replaced(batch, moved, checked.origin.reformed if checked.origin is not None else None)
        shortened: object = renumbered(stand_in, cut_lengths(leaves, legal))
        return shortened

    def _legal(self, structure: Any, leaves: Mapping[str, torch.Tensor], oddities: Sequence[Oddity]) -> dict[str, torch.Tensor] | None:
        def recheck(leaves: Mapping[str, torch.Tensor]) -> tuple[list[Finding], list[Rule]]:
            plan = plan_for([*declared_rules(leaves), *self._contract.usable(structure)], leaves, shapes_of(leaves))
            return plan.findings(leaves, {key: extremes(tensor, plan.ignored.get(key, -100)) for key, tensor in leaves.items()})

        return legal_stand_in(leaves, oddities, self._seen, recheck, resolver(shapes_of(leaves)))
