"""The dispatch mode that feeds a tape while a step is traced. Owns pushing and popping, which are not nested in the user's program.

A dispatch mode, because a function mode makes torch.compile recompile. While it is pushed torch.compile runs eagerly ("force_eager"): frames
first seen under a mode would otherwise stay eager for ever, silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from torch_watchdog_agent.contract.calls import Call, call_under_way
from torch_watchdog_agent.contract.consumers import Use, uses_of
from torch_watchdog_agent.contract.frames import Place, place_of_call
from torch_watchdog_agent.contract.nodes import Schema, schema_of
from torch_watchdog_agent.contract.stretched import stretched
from torch_watchdog_agent.contract.tape import Site, Tape
from torch_watchdog_agent.contract.watchers import Watchers
from torch_watchdog_agent.errors import BadBatchError, of_a_signal
from torch_watchdog_proto.messages import Violation

__all__ = ["USUAL", "Standing", "TraceMode", "compiled_code_in_the_way", "modes_on_stack", "without_modes"]

MAX_OPERATORS = 200_000  # a step of more (generation) is not recorded to its end
Examine = Callable[[Site, Sequence[torch.Tensor], torch.Tensor | None], None]


def modes_on_stack() -> int:
    """How many dispatch modes are pushed on this thread."""
    return int(torch._C._len_torch_dispatch_stack())


def compiled_code_in_the_way() -> bool:
    """Whether something is compiled and this torch (before 2.6) cannot set that aside for a step: under a mode it would compile anew each time."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return not hasattr(torch.compiler, "set_stance") and any(map(callable, getattr(frames, "cached_backends", {}).values()))


class Standing:
    """What is on for this thread, to be put back where a handler of a signal raises between two halves of a change."""

    __slots__ = ("_grad", "_modes")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._modes = [torch._C._get_dispatch_stack_at(at) for at in range(modes_on_stack())] if modes_on_stack() else []

    @classmethod
    def usual(cls) -> Standing:
        """Gradients are on, and no mode is."""
        usual = cls()
        usual._grad, usual._modes = True, []
        return usual

    def put_back(self, ours: TraceMode | None = None) -> None:
        """But for one of ours that was popped since; and `ours`, which was pushed since, stays to be popped as is right."""
        modes = [mode for mode in self._modes if not isinstance(mode, TraceMode) or mode.pushed]
        if ours is not None and ours.pushed and ours not in modes:
            modes.append(ours)
        if modes or modes_on_stack():
            _off_the_stack()
            for mode in modes:
                _push_mode(mode)
        torch._C._set_grad_enabled(self._grad)


USUAL = Standing.usual()


class without_modes:  # noqa: N801  said as torch.no_grad is
    """Our own tensor work: seen by no mode, recorded by no autograd. No generator: one that a signal left in the middle would end at some later time."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = Standing()

    def __enter__(self) -> None:
        torch._C._set_grad_enabled(False)
        _off_the_stack()

    def __exit__(self, *_: object) -> None:
        self._before.put_back()


def _off_the_stack() -> None:
    while modes_on_stack():
        _pop_mode()


class TraceMode(TorchDispatchMode):  # type: ignore[misc]
    """Records every operator of a traced step; `examine` is asked about each use before its operator runs, and may raise BadBatchError.

    `notice` is told what looks wrong and runs.
    """

    supports_higher_order_operators = True  # flex_attention and cond raise under a mode that does not say so

    def __init__(self, tape: Tape, examine: Examine, notice: Callable[[Violation], None]) -> None:
        super().__init__()
        self.tape, self.watchers = tape, Watchers(tape)
        self.failure: Exception | None = None
        self.pushed, self.refused, self.full, self.saw_backward = False, False, False, False
        self.spoiled = False  # a bad batch was let through: there is nothing to learn from it
        self._operators = 0
        self.call: Call | None = None
        self._call_seen = False
        self._zeros_call: tuple[str, int] | None = None  # the program's call that made zeros last
        self._examine, self._notice = examine, notice
        self._stance: Any = None

    def push(self) -> bool:
        """Start recording; False where another mode is at work on this thread."""
        if modes_on_stack():
            return False
        self.__enter__()
        self.pushed = True
        self._hold_compile()
        return True

    def pop(self) -> bool:
        """Stop recording; False where another mode was pushed over ours: try again later."""
        if not self.pushed:
            return True
        depth = modes_on_stack()
        if depth == 0 or torch._C._get_dispatch_stack_at(depth - 1) is not self:
            return False
        try:
            self.__exit__(None, None, None)
        except IndexError:  # a signal's handler has raised in the middle of this before
            _pop_mode()
        self.pushed = False
        self._release_compile()
        return True

    def _hold_compile(self) -> None:
        # Importing dynamo takes seconds: where nobody has, there is no compiled frame yet.
        if self._stance is None and "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stance = torch.compiler.set_stance("force_eager")
            stance.__enter__()
            self._stance = stance

    def _release_compile(self) -> None:
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() != -1:
            self.saw_backward = True
            return func(*args, **kwargs)
        if self.failure is not None or self.refused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # failed, refused, or a higher-order operator
        schema = schema_of(func)
        self._operators += 1
        self.full = self._operators > MAX_OPERATORS
        if schema.fused or self.full:
            return func(*args, **kwargs)
        self._guarded(self._before, func, schema, args, kwargs)
        out = func(*args, **kwargs)
        self._guarded(self._after, func, schema, args, kwargs, out)
        return out

    def _guarded(self, body: Callable[..., None], *args: Any) -> None:
        """Whatever fails in our own record, the operator runs; but what a handler of a signal has raised is the script's."""
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # in one call, and back in one: a signal's handler may raise between the two
            body(*args)
        except BadBatchError:
            raise
        except Exception as error:
            if of_a_signal(error):
                self.refused = True  # half a record teaches nothing
                raise
            self.failure = error
        finally:
            torch._C._set_grad_enabled(before)

    def _before(self, func: Any, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._hold_compile()
        if not self._call_seen:
            self._call_seen, self.call = call_under_way(self.tape)
        for use in uses_of(func, schema.position, args, kwargs) or self.watchers.comes(schema.name, args):
            self._consume(use, schema.name, func, args)

    def _consume(self, use: Use, name: str, func: Any, args: tuple[Any, ...]) -> None:
        place = place_of_call(self.tape.names)
        tensors = use.tensors
        site = self.tape.consume(use, self._op_name(name, func, args, place), place, self.tape.latest)
        table, use.tensors, use.table = use.table, (), None
        self._examine(site, tensors, table)

    def _op_name(self, name: str, func: Any, args: tuple[Any, ...], place: Place) -> str:
        """The name that a user knows. one_hot has no frame of its own: in one call of the program it makes zeros and scatters ones."""
        if func is torch.ops.aten.scatter_.value and args[3] == 1 and self._zeros_call == place.call:
            return "one_hot"
        return place.op or _trimmed(name)

    def _after(self, func: Any, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        if schema.name in ("zeros", "new_zeros"):
            self._zeros_call = place_of_call(self.tape.names).call
        if schema.name == "expand" and out.shape != args[0].shape:
            found = stretched(out, place_of_call(self.tape.names), self.tape)
            if found is not None:
                self._notice(found)
        read = place_of_call(self.tape.names).call if schema.name == "_local_scalar_dense" else None
        self.tape.record(func, schema, args, kwargs, out, read)
        for use, name in self.watchers.seen(schema.name, args, out):
            self._consume(use, name, func, args)


def _trimmed(name: str) -> str:
    name = name.strip("_")
    for ending in ("_forward_only", "_forward"):
        name = name.removesuffix(ending)
    name = name.removesuffix("_with_sizes")
    return {"nll_loss2d": "nll_loss", "index_put_impl": "index_put", "unsafe_index": "index"}.get(name, name)
