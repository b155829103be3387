"""What an attempt's orders and failures mean for the launch's end: its exit code, and what is to be said of an order that came to nothing.

Owns which of several reasons for an exit code wins. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch_watchdog_proto import messages as m
from torch_watchdog_proto.exit_codes import exit_code_of
from torch_watchdog_proto.rescue_words import Rescue
from torch_watchdog_proto.stop import events as stop

__all__ = ["Ending"]


class Ending:
    """One attempt's. `stood_code`: of a standstill that the job ended for."""

    def __init__(self) -> None:
        self.stood_code: int | None = None
        self._closed: stop.Closed | None = None  # the last order that was done
        self._given_up: stop.Closed | None = None
        self._said: set[int] = set()  # generations whose end the nodes say, as it happens
        self._leave_codes: dict[int, int] = {}  # generation of an order that tells ranks to leave -> its exit code
        self._left_code: int | None = None  # of the one that ranks have left on
        self._left_on = 0  # and its generation
        self._good: set[int] = set()  # generations of which a good checkpoint is there, by the word of the rank that sealed it
        self._not_good: set[int] = set()
        self._rescues: set[int] = set()  # generations of saves that ranks were asked for once another had failed
        self._left_a_failure = False  # ranks have, once one of them had failed

    @property
    def is_stopping(self) -> bool:
        """Whether an order that ends the launch is done."""
        return self._closed is not None and self._closed.exit_code is not None

    @property
    def why(self) -> str:
        """The reason of the last order that was done."""
        return "" if self._closed is None else self._closed.reason

    def told(self, order: m.Order) -> None:
        if isinstance(order, m.Commit) and order.leave:
            self._leave_codes[order.generation] = order.exit_code
        if isinstance(order, m.Abandon):
            self._said.add(order.generation)
        if isinstance(order, Rescue):
            self._rescues.add(order.generation)
        if isinstance(order, m.WriteCommitted) and not order.good:
            self._not_good.add(order.generation)

    def sealed(self, word: m.Committed) -> None:
        if word.error is None and word.generation not in self._not_good:
            self._good.add(word.generation)

    def left(self, generation: int, *, earlier: int | None) -> None:
        """A rank has, on the order of that number. `earlier`: the code of one that a daemon before this one gave."""
        code = self._leave_codes.get(generation, earlier)
        if code is None:
            self._left_a_failure = True
        else:
            self._left_code, self._left_on = code, generation

    def closed(self, closed: stop.Closed) -> None:
        if closed.outcome == "done":
            self._closed = closed
        else:
            self._given_up = closed

    def stood_still(self, *, desync: bool) -> None:
        self.stood_code = m.EXIT_BAD_DATA if desync else m.EXIT_MACHINE

    def exit_code(self, *, failed: bool, observed: bool, bad_batch: bool, of_health: int | None) -> int | None:
        """None: the command's own code stands. A stop of ours that was completed names its code; so does a bad batch that made the command fail."""
        if self._closed is not None and self._closed.exit_code is not None:
            return self._closed.exit_code
        if self._left_code is not None:
            # The order was given up, but not before ranks had left on it: their keepers say 0.
            return exit_code_of(self._left_code, saved=self._left_on in self._good)
        if failed and self.stood_code is not None and not observed:
            return self.stood_code
        if (failed or self._left_a_failure) and bad_batch:
            return m.EXIT_BAD_DATA
        if not failed and self._left_a_failure:
            # The first failure's own status looks like a good one (256, or an early 0), and keepers say 0 of those that left.
            return m.EXIT_FAILED
        return of_health if failed and not observed else None

    def lines(self) -> Iterable[str]:
        """What a person should know of orders that did not come to what they were for, and what the nodes have not said by then."""
        if self._closed is not None and (why := stop.why_no_more_skips(self._closed.reason)):
            yield why
        if self._closed is not None and stop.NO_CHECKPOINT in self._closed.reason:
            yield f"no good checkpoint was made: {self._closed.reason.partition(stop.NO_CHECKPOINT)[2]}"
        if self._closed is None and self._given_up is not None and self._given_up.generation not in self._said:
            order = self._given_up
            aim, why = stop.aim_of(order.kind, leaves=order.exit_code is not None), order.reason
            is_saved = bool(self._rescues & self._good)
            yield (
                f"{aim} gave way to a failure: {why}; the state was saved all the same"
                if is_saved
                else f"{aim} could not be completed: {why}"
            )
