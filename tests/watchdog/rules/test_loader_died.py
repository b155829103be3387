"""A worker of the data loader that died is told as such, with its pid and what to change; an exception inside a worker is the dataset's."""

from __future__ import annotations

import pytest

from torch_watchdog.job.first_failure import FirstFailure, RankEnd
from torch_watchdog.rules.death import Verdict, judge
from torch_watchdog.rules.loader_died import loader_death


def verdict_on(text: str, log: str = "") -> Verdict:
    return judge(FirstFailure(culprits=(RankEnd(rank=1, node="a", pid=1, exit_code=1, step=40, text=text, log=log),), victims=(0,)))


@pytest.mark.parametrize(
    ("text", "said", "word"),
    [
        (
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ",
            "worker (pid 4711) killed by signal: Killed",
            "prefetch_factor",
        ),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
            "(pid 7) killed by signal: Bus error",
            "shm",
        ),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", "Segmentation fault", "spawn"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted. ", "Aborted", "num_workers=0"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. ", "Terminated", "scheduler"),
        ("RuntimeError: DataLoader worker (pid(s) 81, 82) exited unexpectedly", "(pid 81, 82) exited unexpectedly", "num_workers=0"),
    ],
)
def test_a_dead_worker_is_told_with_its_pid_and_what_to_change(text: str, said: str, word: str) -> None:
    verdict = verdict_on(text)
    assert (verdict.kind, verdict.severity) == ("loader.worker_died", "critical")
    assert verdict.summary.startswith("rank 1, in step 40: data loader worker")
    assert said in verdict.summary
    assert word in verdict.fix


@pytest.mark.parametrize(
    "text", ["", "ValueError: Caught ValueError in DataLoader worker process 0.", "RuntimeError: DataLoader timed out after 5 seconds"]
)
def test_any_other_error_is_none_of_them(text: str) -> None:
    assert loader_death(text) is None
    assert verdict_on(text).kind == "rank.exception"


def test_a_worker_that_the_container_killed_for_memory_is_an_out_of_memory() -> None:
    assert (
        verdict_on("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", "oom-kill: constraint=MEMCG").kind
        == "memory.oom"
    )


def test_what_the_rank_met_of_it_is_told_behind_it() -> None:
    """torch says so itself only where it looks at its workers before it reads what one of them has left."""
    verdict = verdict_on(
        "FileNotFoundError: [Errno 2] No such file or directory; DataLoader worker (pid 7) exited unexpectedly with exit code 3"
    )
    assert verdict.kind == "loader.worker_died"
    assert (
        "data loader worker (pid 7) exited unexpectedly with exit code 3; the rank then met FileNotFoundError: [Errno 2]" in verdict.summary
    )
    assert "called exit" in verdict.cause


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("SystemExit: 256", "sees 0, as of a rank that ended well"),
        ("SystemExit: -1", "sees 255)"),
        ("SystemExit: 3", ""),
        ("SystemExit: no data", ""),
    ],
)
def test_a_status_that_the_launcher_does_not_see_as_it_was_asked_for_is_said(text: str, seen: str) -> None:
    verdict = verdict_on(text)
    assert verdict.kind == "rank.exception" and text in verdict.summary
    assert ("launcher sees" in verdict.cause) == bool(seen) and seen in verdict.cause
