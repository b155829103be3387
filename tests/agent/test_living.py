"""Objects are found among all of the interpreter's, and no other thread notices."""

from __future__ import annotations

import threading

from torch import nn

from torch_watchdog_agent.living import instances, instances_of

SCANS = 8


class Mine(nn.Linear):
    pass


def test_every_instance_of_a_class_and_its_subclasses_is_found_once() -> None:
    mine, plain = Mine(2, 2), nn.Linear(2, 2)
    found = instances_of(nn.Linear)
    assert sum(item is mine for item in found) == sum(item is plain for item in found) == 1
    assert all(isinstance(item, nn.Linear) for item in found)
    assert [item for item in instances("torch.nn", "Linear") if item is mine] == [mine]
    assert instances("torch.nn", "Nothing") == instances("no.such.module", "Linear") == []


class Unhashable(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other


class Odd(metaclass=Unhashable):
    pass


def test_a_class_that_has_no_hash_disturbs_nobody() -> None:
    odd, model = Odd(), Mine(2, 2)
    assert any(item is model for item in instances_of(nn.Module))
    assert [item for item in instances_of(Odd) if item is odd] == [odd]


def test_a_thread_that_builds_tuples_meanwhile_goes_on() -> None:
    """Whoever holds a tuple that is not whole yet makes its builder fail (SystemError): here that took a few scans."""
    built, failed, over = 0, [], threading.Event()

    def build() -> None:
        nonlocal built
        while not over.is_set():
            try:
                built += len(tuple(nn.Linear for _ in range(2000))) // 2000  # a class that is looked for is in it
            except SystemError as error:
                failed.append(error)

    builders = [threading.Thread(target=build) for _ in range(2)]
    for builder in builders:
        builder.start()
    for _ in range(SCANS):
        instances_of(nn.Module)
    over.set()
    for builder in builders:
        builder.join()
    assert built > 0
    assert failed == []
