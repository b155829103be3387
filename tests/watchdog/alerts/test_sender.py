"""The task that tells: whatever a receiver's call ends in, what it should have told is tried again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from test_desk import facts, incident

from torch_watchdog.alerts.alert import Delivery
from torch_watchdog.alerts.desk import AlertDesk
from torch_watchdog.alerts.open import Rules
from torch_watchdog.alerts.routes import Match, Route
from torch_watchdog.alerts.sender import AlertSender


@dataclass
class Broken:
    """Raises what nobody foresaw, the first time."""

    name: str = "pager"
    rules: Rules = field(default_factory=Rules)
    told: list[Delivery] = field(default_factory=list)
    calls: int = 0

    async def send(self, delivery: Delivery) -> str:
        self.calls += 1
        if self.calls == 1:
            "\ud800".encode()
        self.told.append(delivery)
        return "taken"

    async def close(self) -> None:
        pass


def test_a_receiver_that_breaks_in_a_way_that_nobody_foresaw_is_tried_again() -> None:
    now, said, receiver = [1000.0], list[str](), Broken()
    desk = AlertDesk((Route(match=Match(), to=("pager",)),), {"pager": receiver.rules})
    sender = AlertSender(desk, [receiver], clock=lambda: now[0], say=said.append, log=said.append, keep=lambda: None)

    async def tell() -> None:
        desk.incident(incident(), facts(), now[0])
        for _ in range(2):
            now[0] += 10.0
            await sender.finish(5.0, last_words=False)

    asyncio.run(tell())
    assert [delivery.action for delivery in receiver.told] == ["trigger"] and receiver.calls == 2
    assert any("UnicodeEncodeError" in line for line in said) and said[-1] == "alert receiver pager takes alerts again"


def test_what_is_only_said_again_lest_a_receiver_forget_it_is_no_line_of_the_log() -> None:
    now, said, receiver = [1000.0], list[str](), Broken(rules=Rules(resend_s=60.0), calls=1)
    desk = AlertDesk((Route(match=Match(), to=("pager",)),), {"pager": receiver.rules})
    sender = AlertSender(desk, [receiver], clock=lambda: now[0], say=said.append, log=said.append, keep=lambda: None)

    async def tell() -> None:
        desk.incident(incident(), facts(), now[0])
        for minute in range(6):
            now[0] += 60.0
            if minute == 2:
                desk.acknowledge("job/1", "anna", now[0])
            await sender.finish(5.0, last_words=False)
        desk.incident(incident() | {"status": "resolved"}, facts(), now[0])
        await sender.finish(5.0, last_words=False)

    asyncio.run(tell())
    assert [delivery.action for delivery in receiver.told] == ["trigger"] * 2 + ["acknowledge"] * 4 + ["resolve"]
    assert [line.rpartition(", ")[2] for line in said] == ["trigger", "acknowledge", "resolve"]
