"""The engine: when it looks, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from streams_made import Watch, block, labels

from torch_watchdog.rules.catalogue import check_settings, rules_with
from torch_watchdog.rules.engine import Engine
from torch_watchdog.rules.limits import LIMITS
from torch_watchdog.rules.settings import Timing
from torch_watchdog_proto.messages import StepBlock, StepTable


def test_nothing_is_due_before_anything_was_seen_and_a_look_is_due_after() -> None:
    engine = Engine(codes={}, changes={})
    assert engine.deadline is None
    engine.take_steps(StepTable.of((block(0, 0),)), 10.0)
    assert engine.deadline == 10.0


def test_it_looks_at_most_once_a_second_however_many_reports_come() -> None:
    engine = Engine(codes={}, changes={})
    engine.take_steps(StepTable.of((block(0, 0),)), 10.0)
    engine.judge(10.0)
    engine.take_steps(StepTable.of((block(0, 1),)), 10.1)
    assert engine.deadline == 11.0


def test_while_an_alert_waits_time_alone_makes_it_look_again() -> None:
    watch = Watch(straggler={"hold_s": 5})
    watch.seconds(40, lambda step: (block(rank, step, own_ms=60 if rank else 20, wait_ms=5) for rank in range(2)))
    assert watch.engine.deadline is not None


def test_a_rule_that_is_off_is_silent() -> None:
    watch = Watch(straggler={"enabled": False})
    watch.seconds(90, lambda step: (block(rank, step, own_ms=60 if rank else 20, wait_ms=5) for rank in range(2)))
    assert watch.told == []


def test_a_threshold_of_the_user_counts() -> None:
    watch = Watch(straggler={"ratio": 4.0})
    watch.seconds(90, lambda step: (block(rank, step, own_ms=60 if rank else 20, wait_ms=5) for rank in range(2)))
    assert watch.told == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stragler": {}}, "names no rule 'stragler'"),
        ({"straggler": {"ration": 2}}, "has no setting 'ration'"),
        ({"straggler": {"ratio": "2"}}, "ratio must be a number"),
        ({"straggler": {"enabled": 1}}, "enabled must be true or false"),
        ({"straggler": {"ratio": -1}}, "not negative"),
        ({"loss_spike": {"steps": 2.5}}, "steps must be a whole number"),
        ({"straggler": 3}, "must be a table"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_expected(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_settings(changes)


def test_every_rule_says_what_it_watches_and_what_it_does() -> None:
    rules = rules_with({})
    assert len({rule.about.name for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.about.watches
        assert rule.about.says
        settings = rule.settings()
        assert settings.hold_s >= 0
        assert settings.keep_s >= 0


@pytest.mark.parametrize(("name", "settings"), [*((rule.about.name, rule.settings) for rule in rules_with({})), *LIMITS.items()])
def test_each_threshold_is_said_with_what_it_counts_where_it_is_shown(name: str, settings: type[Any]) -> None:
    """`watchdog rules show` prints these words below the numbers."""
    own = {field.name for field in fields(settings)} - {field.name for field in fields(Timing)}
    assert [setting for setting in own if f"`{setting}`" not in (settings.__doc__ or "")] == []


def test_a_batch_whose_loss_comes_after_its_gate_is_counted_all_the_same() -> None:
    """On a GPU the loss arrives a step later."""
    watch = Watch()
    empty: dict[str, Any] = dict.fromkeys(
        ("micro_step", "micro_of_step", "micro_time_ns", "loader_ns", "loss", "loss_known", "evaluation", "forward_ns", "scale"), ()
    )
    only_gate: dict[str, Any] = dict.fromkeys(
        ("step", "step_time_ns", "step_ns", "vetoed", "updates_applied", "backward_ns", "grad_norm"), ()
    )

    def late(step: int, rank: int) -> Iterator[StepBlock]:
        own = 60 if rank else 20
        yield replace(block(rank, step, own_ms=own, gpu=f"GPU-{rank}"), tensors=(), **empty)
        if step:
            yield replace(block(rank, step - 1, own_ms=own, gpu=f"GPU-{rank}"), **only_gate)

    watch.seconds(90, lambda step: (one for rank in range(2) for one in late(step, rank)))
    assert watch.told == [("straggler", 1, "fires")]


def loading(ranks: int, slow: range, *, since: int = 40) -> Callable[[int], Iterator[StepBlock]]:
    def made(step: int) -> Iterator[StepBlock]:
        for rank in range(ranks):
            yield block(rank, step, own_ms=520, loader_ms=500 if rank in slow and step >= since else 1)

    return made


def test_what_more_than_half_of_many_ranks_show_is_one_finding_with_its_ranks() -> None:
    watch = Watch()
    watch.seconds(80, loading(20, range(3, 20)))
    (only,) = watch.found
    assert (only.about.name, only.sign.rank, only.sign.affected) == ("slow_loader", None, tuple(range(3, 20)))
    assert only.sign.said.startswith("17 of 20 ranks, as rank 3, step ")
    assert only.sign.cause.startswith("most ranks at once")


def test_up_to_half_of_them_and_a_few_that_are_all_there_are_are_told_one_by_one() -> None:
    for ranks, slow in ((20, range(10)), (8, range(8))):
        watch = Watch()
        watch.seconds(80, loading(ranks, slow))
        assert watch.told == [("slow_loader", rank, "fires") for rank in slow]


def test_a_rank_that_stays_as_it_is_after_most_have_recovered_is_told_then() -> None:
    watch = Watch()
    watch.seconds(80, loading(20, range(20)))
    watch.seconds(80, loading(20, range(4, 5), since=0), start=80)
    assert watch.told == [("slow_loader", None, "fires"), ("slow_loader", None, "resolves"), ("slow_loader", 4, "fires")]


def test_most_are_one_finding_also_where_the_first_look_has_seen_less_than_half_of_them() -> None:
    """A rule that tells at once: the other nodes' reports come a moment later."""
    watch = Watch()

    def made(step: int, ranks: range) -> list[StepBlock]:
        return [block(rank, step, tensors=(labels(3, ignored=99 if step >= 70 else 20),)) for rank in ranks]

    for step in range(100):
        watch.second(*made(step, range(9)), *made(step - 1, range(9, 20)) if step else ())
    assert watch.told == [("supervision", None, "fires")]


def test_most_are_told_also_where_as_many_as_are_kept_were_seen_one_by_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 of 4,096 ranks, then all: the one finding had found no room, and the ranks' own waited for it for ever."""
    monkeypatch.setattr("torch_watchdog.rules.engine._MAX_ALERTS", 9)
    watch = Watch()

    def made(step: int) -> Iterator[StepBlock]:
        slow = range(9 if step < 44 else 20)
        return loading(20, slow)(step)

    watch.seconds(90, made)
    assert watch.told == [("slow_loader", None, "fires")]
