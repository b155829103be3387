"""The errors that the agent raises into a training. Owns their words; knows nothing of torch, so that anyone may import it."""

from __future__ import annotations

import re
import signal
import traceback

from torch_watchdog_proto.messages import Violation

__all__ = ["AgentError", "BadBatchError", "let_through", "of_a_lost_device", "of_a_signal", "text_of"]

# After these no call of CUDA's succeeds in this process any more. Memory that ran out is none of them.
_LOST = re.compile(r"CUDA error: (?!out of memory)")


class AgentError(Exception):
    """Anything that the agent raises on purpose."""


class BadBatchError(AgentError, RuntimeError):
    """The model cannot take this batch. The message is the whole diagnosis.

    Not an IndexError: models catch that around their embeddings and put words of their own in its place.
    """

    def __init__(self, violation: Violation) -> None:
        super().__init__(described(violation))
        self.violation = violation


def described(violation: Violation) -> str:
    """The whole diagnosis as text, one fact a line."""
    lines = [violation.summary]
    bound = violation.bound
    if bound is not None:
        where = " ".join(
            part for part in (f"in {bound.module}" if bound.module else "", f"at {bound.source}" if bound.source else "") if part
        )
        lines.append(f"refused by {bound.op} {where}".rstrip())
    sample = violation.batch.sample
    if sample is not None and sample.dataset_index is not None:
        lines.append(f"sample: index {sample.dataset_index} of the data set, position {sample.position_in_batch} of the batch")
    lines += [f"cause: {violation.cause}", f"fix: {violation.fix}"]
    return "\n  ".join(lines)


def text_of(error: BaseException) -> str:
    """What it says; empty where its own code for that fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's own class
        return ""


def of_a_signal(error: BaseException) -> bool:
    """Whether a handler of a signal has raised this: in whatever it interrupted. It is the script's, wherever that was."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def let_through(error: BaseException) -> None:
    """Raises what a handler of a signal has raised, where another of its type is expected."""
    if of_a_signal(error):
        raise error


def _code_of(handler: object) -> object:
    called = getattr(handler, "func", handler)  # of a partial
    return getattr(called if hasattr(called, "__code__") else vars(type(called)).get("__call__"), "__code__", None)


def of_a_lost_device(error: BaseException) -> bool:
    """Whether the GPU is what failed: whoever asks it next hears the same, the training first of all."""
    return _LOST.search(text_of(error)) is not None
