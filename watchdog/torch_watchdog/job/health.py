"""The rules of one job: a new engine for each attempt, and what the GPUs' errors mean for the exit code.

Owns the engine; the judgement is in rules/. Fails open: a mistake in a rule ends the rules, never an order under way. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch_watchdog.rules.xid import XidCode, exit_code_of
from torch_watchdog_proto.messages import EXIT_MACHINE, GpuSample, StepTable

if TYPE_CHECKING:
    from torch_watchdog.rules.engine import Engine, Finding

__all__ = ["NO_CODES", "Health"]

_Result = TypeVar("_Result")
NO_CODES: Mapping[int, XidCode] = {}
_FAILED_GPU = ("gpu.lost", "gpu.ecc")  # by itself; what an Xid means its catalogue says


class Health:
    """What the rules say of the newest attempt."""

    def __init__(self, *, codes: Mapping[int, XidCode], changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._codes, self._changes = codes, changes
        self._failure: str | None = None  # why the rules have ended, "" once that was told
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Nothing of the old ranks may leak into what is said of the new ones."""
        self._engine: Engine | None = None
        self._gpu_failed = False
        self._xids: set[int] = set()

    @property
    def deadline(self) -> float | None:
        return None if self._failure is not None or self._engine is None else self._engine.deadline

    @property
    def exit_code(self) -> int | None:
        """Of a job that failed: 75 where a machine is to blame, 65 where the driver blames the program, None where nothing was told of GPUs."""
        if self._gpu_failed:
            return EXIT_MACHINE
        return exit_code_of(self._xids, self._codes)

    def take_steps(self, table: StepTable, now: float) -> None:
        if table.rank:
            self._guarded(lambda: self._rules().take_steps(table, now), None)

    def take_gpu(self, node: str, sample: GpuSample, now: float) -> None:
        self._guarded(lambda: self._rules().take_gpu(node, sample, now), None)

    def findings(self, now: float, *, at_end: bool) -> tuple[Finding, ...]:
        nothing: tuple[Finding, ...] = ()
        engine = self._engine
        found = nothing if engine is None else self._guarded(lambda: engine.judge(now, at_end=at_end), nothing)
        for finding in found:
            self._gpu_failed |= finding.about.kind in _FAILED_GPU and (finding.sign.severity or finding.about.severity) == "critical"
            self._xids.update(event["code"] for event in finding.sign.evidence.get("xid", ()))
        return found

    def failed(self) -> str | None:
        """Why the rules have ended, once."""
        failure, self._failure = self._failure, "" if self._failure else self._failure
        return failure or None

    def _rules(self) -> Engine:
        """Loaded with the first that is to be judged: they need numpy, which takes longer to load than all of a launch."""
        if self._engine is None:
            from torch_watchdog.rules.engine import Engine

            self._engine = Engine(codes=self._codes, changes=self._changes)
        return self._engine

    def _guarded(self, body: Callable[[], _Result], otherwise: _Result) -> _Result:
        if self._failure is not None:
            return otherwise
        try:
            return body()
        except Exception as error:  # noqa: BLE001 - who stops the job must not fall with who only watches it
            self._failure = f"{type(error).__name__}: {error}"
            return otherwise
