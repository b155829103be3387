"""The task that tells: asks the desk what is due, sends it, and tells the desk what came of it.

Owns the calls under way. A receiver that is slow or gone delays only itself; what it did not take is tried again, and said once on the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

from torch_watchdog.alerts.alert import Action, Delivery
from torch_watchdog.alerts.desk import AlertDesk
from torch_watchdog.alerts.receivers import Receiver
from torch_watchdog.errors import AlertError

__all__ = ["AlertSender"]

_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.2, 30.0
_MAX_AT_ONCE = 16


class AlertSender:
    """`run` until cancelled, then `finish`. `keep` is called whenever something was delivered."""

    def __init__(
        self,
        desk: AlertDesk,
        receivers: Sequence[Receiver],
        *,
        clock: Callable[[], float],
        say: Callable[[str], None],
        log: Callable[[str], None],
        keep: Callable[[], None],
    ) -> None:
        """`say` gets a line where a receiver begins to fail and where it takes alerts again, `log` one for every alert that was told, first failed, or was
        given up.
        """
        self._desk, self._clock, self._say, self._log, self._keep = desk, clock, say, log, keep
        self._receivers = {receiver.name: receiver for receiver in receivers}
        self._wake = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._in_trouble: set[str] = set()
        self._failing: set[tuple[str, str]] = set()  # key and receiver of alerts whose failure was said
        self._said: dict[tuple[str, str], Action] = {}  # of those: the newest that the log knows
        self.outcomes: Counter[tuple[str, str]] = Counter()  # (receiver, delivered or failed)

    def wake(self) -> None:
        """Something has changed."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._start_due(closing=False)
            self._wake.clear()
            deadline = self._desk.next_deadline(self._clock())
            sleep_s = _LONGEST_SLEEP_S if deadline is None else deadline - self._clock()
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, sleep_s))):
                    await self._wake.wait()

    async def finish(self, timeout_s: float, *, last_words: bool) -> None:
        """Sends what is due, for at most so long. `last_words`: nobody will say more of these alerts, so they are told to last."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._start_due(closing=last_words) or self._calls or (last_words and self._desk.has_last_words(self._clock())):
                    await (asyncio.wait(self._calls) if self._calls else asyncio.sleep(_SHORTEST_SLEEP_S))
        for call in tuple(self._calls):
            call.cancel()
        for receiver in self._receivers.values():
            await receiver.close()

    def _start_due(self, *, closing: bool) -> bool:
        due = self._desk.due(self._clock(), closing=closing)
        for delivery in due:
            call = asyncio.create_task(self._tell(delivery))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        for name, receiver in self._desk.given_up():
            self._log(f"alert {name}: given up, {receiver} did not take it within a day of its end")
        return bool(due)

    async def _tell(self, delivery: Delivery) -> None:
        try:
            async with self._slots:
                await self._receivers[delivery.receiver].send(delivery)
        except AlertError as error:
            self._failed(delivery, error)
        except Exception as error:  # noqa: BLE001 - an alert whose call has ended in whatever way must not stay under way for ever
            self._failed(delivery, AlertError(delivery.receiver, f"was not called ({type(error).__name__})"))
        else:
            self._delivered(delivery)
        self._wake.set()

    def _delivered(self, delivery: Delivery) -> None:
        self.outcomes[(delivery.receiver, "delivered")] += 1
        self._desk.delivered(delivery, self._clock())
        self._keep()
        self._failing.discard((delivery.alert.key, delivery.receiver))
        self._log_once(delivery)
        if delivery.receiver in self._in_trouble:
            self._in_trouble.discard(delivery.receiver)
            self._say(f"alert receiver {delivery.receiver} takes alerts again")

    def _log_once(self, delivery: Delivery) -> None:
        """What is only said again every minute, lest a receiver forget it, is no news."""
        line = (delivery.alert.key, delivery.receiver)
        if delivery.action != self._said.get(line, "trigger" if delivery.again else None):
            self._log(f"alert {delivery.alert.name}: {delivery.receiver} was told, {delivery.action}")
        self._said[line] = delivery.action
        if delivery.action == "resolve":
            self._said.pop(line)

    def _failed(self, delivery: Delivery, error: AlertError) -> None:
        self.outcomes[(delivery.receiver, "failed")] += 1
        self._desk.failed(delivery, self._clock())
        if (delivery.alert.key, delivery.receiver) not in self._failing:
            self._failing.add((delivery.alert.key, delivery.receiver))
            self._log(f"alert {delivery.alert.name}: {delivery.receiver} was not told, {delivery.action}: it is tried again")
        if delivery.receiver not in self._in_trouble:
            self._in_trouble.add(delivery.receiver)
            self._say(f"{error}: it is tried again, later each time")
