"""A job at a standstill: who is late, who waits, and when that is sure enough to end the job for it."""

from __future__ import annotations

from torch_watchdog.job.hangs import ANSWER_S, ITSELF, HangWatch, Hung
from torch_watchdog.job.standstill import AWAY
from torch_watchdog.rules.limits import HangLimits, limits_of
from torch_watchdog_proto.messages import RankEvent
from torch_watchdog_proto.rescue_words import GroupCalls, Looked

STACK = '  File "/x/train.py", line 7, in main\n    while True:\n'


class Run:
    """Two ranks that made a step a second, and then none; `look` asks them and gives their answers."""

    def __init__(self, step_s: float = 1.0, timeout_s: float = 600.0) -> None:
        self.watch, self.now, self.timeout_s, self.generation = HangWatch({}), 0.0, timeout_s, 0
        for _ in range(10):
            self.now += step_s
            self.watch.progressed(self.now)

    def look(self, *, waits: tuple[int, ...] = (), elsewhere: tuple[int, ...] = (), stopped: tuple[int, ...] = ()) -> Hung | None:
        assert self.watch.deadline is not None
        self.now = max(self.now, self.watch.deadline)
        assert self.watch.should_ask(self.now)
        self.generation += 1
        self.watch.asked(frozenset((*waits, *elsewhere, *stopped)), self.generation, self.now)
        for rank in (*waits, *elsewhere):
            answer = Looked(rank=rank, generation=self.generation, waits=rank in waits, stack=STACK, timeout_s=self.timeout_s)
            self.watch.answered(answer)
        for rank in stopped:
            self.watch.state(rank, "T")
        self.now += ANSWER_S
        return self.watch.verdict(self.now)


def test_nobody_is_asked_before_a_standstill_is_unusual() -> None:
    run = Run(step_s=0.01)
    assert not run.watch.should_ask(run.now + HangLimits().shortest_s - 1)
    assert run.watch.should_ask(run.now + HangLimits().shortest_s)
    slow = Run(step_s=30)
    assert not slow.watch.should_ask(slow.now + 250)


def test_ranks_that_report_in_one_moment_make_no_standstill_unusual_sooner() -> None:
    run = Run(step_s=30)
    for _ in range(10):
        run.now += 30
        for _ in range(4):  # of four ranks, whose batches are no steps: an evaluation
            run.watch.progressed(run.now)
    assert not run.watch.should_ask(run.now + 250)


def test_how_long_a_standstill_may_be_and_when_a_rank_counts_as_hung_are_the_sites_own() -> None:
    usual, patient = Run(step_s=0.01), Run(step_s=0.01)
    patient.watch = HangWatch({"hang": {"shortest_s": 100, "of_timeout": 0.5}})
    for _ in range(10):
        patient.now += 0.01
        patient.watch.progressed(patient.now)
    assert usual.watch.should_ask(usual.now + 10) and not patient.watch.should_ask(patient.now + 99)
    first = patient.look(waits=(0,), elsewhere=(1,))
    assert first is not None and not first.sure
    patient.now += 200  # 303 s of 600
    second = patient.look(waits=(0,), elsewhere=(1,))
    assert second is not None and second.sure


def test_what_a_daemon_is_told_wrongly_changes_no_limit() -> None:
    """The launch has checked them; whoever speaks another version has not."""
    for wrong in ({"hang": {"shortest_s": -1}}, {"hang": 3}, {"hang": {"new": 1}}, {"hang": {"shortest_s": "10"}}):
        assert limits_of(HangLimits, wrong) == HangLimits()


def test_the_first_steps_teach_before_anything_is_unusual() -> None:
    watch = HangWatch({})
    watch.progressed(0.0)
    watch.progressed(1.0)
    assert watch.deadline is None


def test_a_stopped_rank_is_hung_when_it_is_found_so_twice() -> None:
    run = Run()
    first = run.look(waits=(0,), stopped=(1,))
    assert first is not None and not first.sure
    second = run.look(waits=(0,), stopped=(1,))
    assert second is not None
    assert (second.ranks, second.waiting, second.sure) == ((1,), (0,), True)
    assert "SIGSTOP" in second.why and "rank 0: waits in a collective" in second.stacks


def test_what_the_workers_of_a_loader_do_stands_beside_the_stack_of_their_rank() -> None:
    run = Run()
    assert run.watch.deadline is not None
    run.now = run.watch.deadline
    run.watch.asked(frozenset((0, 1)), 1, run.now)
    run.watch.answered(Looked(rank=0, generation=1, waits=True, stack=STACK, timeout_s=600.0))
    run.watch.state(1, "T")
    for rank, text in ((0, "rank, pid 5: waits\n"), (1, "rank, pid 6: waits\nworker, pid 7: waits, in Rows.__getitem__ (t.py:6)\n")):
        run.watch.hear(RankEvent(rank=rank, attempt=0, pid=5 + rank, kind="workers", time_ns=0, order=1, text=text), run.now)
    hung = run.watch.verdict(run.now + ANSWER_S)
    assert hung is not None
    assert "worker, pid 7: waits, in Rows.__getitem__ (t.py:6)" in hung.stacks and "pid 5" not in hung.stacks


def test_a_stopped_job_is_no_hang() -> None:
    """All ranks are stopped, by a person or a scheduler."""
    run = Run()
    assert run.look(stopped=(0, 1)) is None
    assert run.look(stopped=(0, 1)) is None


def test_a_stopped_rank_is_hung_also_where_the_others_sleep_in_native_code_and_cannot_say_whom_they_wait_for() -> None:
    """As in NCCL's launch of a collective over sockets."""

    def look(run: Run, *, state: str) -> Hung | None:
        assert run.watch.deadline is not None
        run.now = run.watch.deadline
        run.watch.asked(frozenset((0, 1)), 1, run.now)
        run.watch.state(0, state)
        run.watch.state(1, "T")
        run.now += ANSWER_S
        return run.watch.verdict(run.now)

    run = Run()
    first, second = look(run, state="S"), look(run, state="S")
    assert first is not None and not first.sure
    assert second is not None and second.sure and second.ranks == (1,) and "SIGSTOP" in second.words
    computes = Run()
    assert look(computes, state="R") is None


def test_a_rank_that_does_something_else_is_late_but_not_hung_until_the_collective_is_about_to_give_up() -> None:
    """It may be writing a checkpoint for minutes while the others wait for it."""
    run = Run(timeout_s=100.0)
    verdicts = [run.look(waits=(0,), elsewhere=(1,)) for _ in range(12)]
    told = [verdict for verdict in verdicts if verdict is not None]
    assert not told[0].sure and "train.py" in told[0].why
    sure = next(verdict for verdict in told if verdict.sure)
    assert sure.ranks == (1,)
    assert run.timeout_s * 0.8 <= run.now


def test_a_standstill_is_told_in_words_from_its_first_verdict_until_a_step_comes() -> None:
    run = Run(timeout_s=100.0)
    run.look(waits=(0,), elsewhere=(1,))
    assert run.watch.standstill.startswith("rank 0 waits for rank 1: ") and "no step for" in run.watch.standstill
    run.look(elsewhere=(0, 1))  # the late one has come, and both go on to a step
    assert run.watch.standstill == ""
    run.look(waits=(0,), elsewhere=(1,))
    run.watch.progressed(run.now)
    assert run.watch.standstill == ""


def test_what_the_watchdog_does_by_itself_is_told_with_it_and_when() -> None:
    run = Run(timeout_s=1800.0)
    run.look(waits=(0,), elsewhere=(1,))
    words = run.watch.standstill
    when = "ends rank 1 and frees the others once no step has come for 24 min (a collective gives up after 30 min)"
    assert run.watch.told(observed=False, ending=False) == f"{words}{ITSELF}{when}"
    assert run.watch.told(observed=True, ending=False) == f"{words}{ITSELF}does nothing about it (policy observe)"
    assert run.watch.told(observed=False, ending=True) == words
    unknown = Run(timeout_s=0.0)
    unknown.look(waits=(0,), elsewhere=(1,))
    assert "does not end it: " in unknown.watch.told(observed=False, ending=False)


def test_the_batch_that_each_rank_had_in_hand_ends_no_standstill() -> None:
    run = Run()
    for _ in range(2):  # a second standstill as the first
        run.look(waits=(0,), elsewhere=(1,))
        run.watch.progressed(run.now, batch_of=0)
        run.watch.progressed(run.now, batch_of=1)
        assert run.watch.standstill
        run.watch.progressed(run.now, batch_of=1)
        assert run.watch.standstill == ""


def test_it_is_sure_well_before_the_collective_gives_up() -> None:
    for timeout_s in (20.0, 30.0, 47.0, 100.0, 600.0):
        run = Run(timeout_s=timeout_s)
        began = run.now
        while not ((hung := run.look(waits=(0,), elsewhere=(1,))) and hung.sure):
            assert run.now - began < timeout_s
        assert 0.8 * timeout_s <= run.now - began <= 0.8 * timeout_s + ANSWER_S


def test_where_nobody_waits_nobody_is_late() -> None:
    run = Run()
    assert run.look(elsewhere=(0, 1)) is None


def test_progress_begins_anew() -> None:
    run = Run()
    run.look(waits=(0,), stopped=(1,))
    run.watch.progressed(run.now)
    verdict = run.look(waits=(0,), stopped=(1,))
    assert verdict is None or not verdict.sure


def test_all_ranks_of_a_node_that_cannot_be_reached_are_named_and_nobody_says_it_was_their_code() -> None:
    run = Run()
    for sure in (False, True):
        run.now = run.watch.deadline or 0.0
        run.generation += 1
        run.watch.asked(frozenset({0, 1, 2, 3}), run.generation, run.now)
        for rank in (0, 1):
            run.watch.answered(Looked(rank=rank, generation=run.generation, waits=True, stack=STACK, timeout_s=600.0))
        run.watch.state(2, AWAY)  # of 3 nobody has said a word, not even its node
        run.now += ANSWER_S
        verdict = run.watch.verdict(run.now)
        assert verdict is not None
        assert (verdict.ranks, verdict.waiting, verdict.sure) == ((2, 3), (0, 1), sure)
        assert verdict.why.startswith("its node cannot be reached")


def look_at_two_nodes(run: Run, *, waits: tuple[int, ...], elsewhere: tuple[int, ...] = (), away: bool = True) -> Hung | None:
    """Ranks 2 and 3 do not answer; `away`: the daemon has seen the line of their node break."""
    assert run.watch.deadline is not None
    run.now = max(run.now, run.watch.deadline)
    run.generation += 1
    run.watch.asked(frozenset({0, 1, 2, 3}), run.generation, run.now)
    for rank in (*waits, *elsewhere):
        run.watch.answered(Looked(rank=rank, generation=run.generation, waits=rank in waits, stack=STACK, timeout_s=600.0))
    for rank in (2, 3) if away else ():
        run.watch.state(rank, AWAY)
    run.now += ANSWER_S
    return run.watch.verdict(run.now)


def test_where_a_rank_that_can_be_seen_is_late_the_others_may_wait_for_that_one() -> None:
    """The wrapper of a node was killed, and its ranks train on unwatched, while rank 0 writes a checkpoint."""
    run = Run()
    for _ in range(10):
        hung = look_at_two_nodes(run, waits=(1,), elsewhere=(0,))
        assert hung is None or (hung.ranks, hung.sure) == ((0,), False)
    gone = [look_at_two_nodes(run, waits=(0, 1)) for _ in range(2)][-1]
    assert gone is not None and (gone.ranks, gone.sure) == ((2, 3), True)


def test_a_node_that_is_only_slow_to_answer_is_not_gone() -> None:
    run = Run()
    for _ in range(10):
        hung = look_at_two_nodes(run, waits=(0, 1), away=False)
        assert hung is None or not hung.sure


def test_a_node_that_is_back_is_asked_anew_before_its_ranks_count_as_gone() -> None:
    """What it was asked lay on the broken line: it came back in the moment in which the second answer was due."""
    run = Run()
    look_at_two_nodes(run, waits=(0, 1))
    assert run.watch.deadline is not None
    run.now = run.watch.deadline
    run.watch.asked(frozenset({0, 1, 2, 3}), 2, run.now)
    for rank in (0, 1):
        run.watch.answered(Looked(rank=rank, generation=2, waits=True, stack=STACK, timeout_s=600.0))
        run.watch.state(rank + 2, AWAY)
    run.watch.node_back((2, 3), run.now + 2)
    assert run.watch.verdict(run.now + ANSWER_S) is None and run.watch.should_ask(run.now + 2)
    run.generation = 2
    assert look_at_two_nodes(run, waits=(0, 1, 2, 3), away=False) is None


def test_what_was_read_from_outside_says_where_a_silent_rank_is() -> None:
    run = Run()
    run.now = run.watch.deadline or 0.0
    run.watch.asked(frozenset({0, 1}), 1, run.now)
    run.watch.answered(Looked(rank=0, generation=1, waits=True, stack=STACK, timeout_s=600.0))
    run.watch.state(1, "S")
    read = "    fail (train.py:66)\n    main (train.py:9)\n"
    run.watch.hear(RankEvent(rank=1, attempt=0, pid=101, kind="stack", time_ns=0, order=1, text=read), run.now)
    verdict = run.watch.verdict(run.now + ANSWER_S)
    assert verdict is not None
    assert "native code holds the interpreter's lock, in fail (train.py:66);" in verdict.why
    assert "main (train.py:9)" in verdict.stacks


# All wait


def ask(run: Run, *, made: dict[int, int], computing: tuple[int, ...] = ()) -> Hung | None:
    assert run.watch.deadline is not None
    run.now = max(run.now, run.watch.deadline)
    run.generation += 1
    run.watch.asked(frozenset(made), run.generation, run.now)
    for rank, count in made.items():
        calls = (GroupCalls(group="0", made=count),)
        answer = Looked(
            rank=rank, generation=run.generation, waits=True, stack=STACK, timeout_s=run.timeout_s, calls=calls, step=9, where="t.py:7"
        )
        run.watch.answered(answer)
        run.watch.state(rank, "R" if rank in computing else "S")
    run.now += ANSWER_S
    return run.watch.verdict(run.now)


def test_ranks_that_all_wait_in_different_collectives_are_told_at_once_and_sure_at_the_second_look() -> None:
    run = Run()
    first = ask(run, made={0: 23, 1: 22, 2: 23})
    assert first is not None and not first.sure
    second = ask(run, made={0: 23, 1: 22, 2: 23})
    assert second is not None
    assert (second.ranks, second.waiting, second.sure, second.desync) == ((1,), (0, 2), True, True)
    assert "rank 1 has called 22 collectives, rank 0 23" in second.why and "t.py:7" in second.why


def test_after_the_network_was_away_one_rank_may_be_a_collective_ahead_while_the_last_bytes_are_sent_again() -> None:
    run = Run()
    run.watch.node_back((2,), run.now)
    looks = [ask(run, made={0: 23, 1: 22, 2: 23}) for _ in range(4)]
    assert all(hung is None or not hung.sure for hung in looks)
    run.watch.progressed(run.now)
    run.watch.progressed(run.now + 1)
    again = [ask(run, made={0: 33, 1: 32, 2: 33}) for _ in range(2)][-1]
    assert again is not None and again.sure


def test_one_that_computes_in_its_backward_has_only_not_come_yet() -> None:
    run = Run()
    ask(run, made={0: 23, 1: 22}, computing=(1,))
    assert ask(run, made={0: 23, 1: 22}, computing=(1,)) is None


def test_counts_that_still_move_are_no_standstill() -> None:
    run = Run()
    ask(run, made={0: 23, 1: 22})
    assert ask(run, made={0: 25, 1: 24}) is None


def test_where_all_wait_in_the_same_collective_no_rank_is_to_blame() -> None:
    run = Run()
    assert ask(run, made={0: 23, 1: 23}) is None
    assert ask(run, made={0: 23, 1: 23}) is None
