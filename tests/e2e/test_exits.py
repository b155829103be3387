"""The ways in which one rank, or a worker of its loader, ends while the others train on: each is told as what it is, the rank's own error comes first and as
torch shows it, and the others save.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import launch, script, torchrun, watchdog

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WORKER = r"data loader worker \(pid \d+\) exited unexpectedly with exit code "
# Whichever torch meets first of a worker that is gone.
LOST = "(FileNotFound|Runtime|BrokenPipe|EOF|Connection(Reset|Refused|Aborted))Error"
TORN_DOWN = r"its script ended, and SIG\w+ ended it on its way out while rank 0 still had steps to do"
TABLE = (
    # where, how, kind, what is said of it, and which error of its own the rank shows first
    ("rank", "256", "rank.exception", r"SystemExit: 256 at .*exits\.py:\d+", ""),
    ("rank", "text", "rank.exception", r"SystemExit: no disk at .*exits\.py:\d+", ""),
    ("rank", "SystemExit", "rank.exception", r"ended with exit code 3", ""),
    ("rank", "none", "rank.desync", r"it ended well while rank 0 still had steps to do", ""),
    ("rank", "torn-down", "rank.desync", TORN_DOWN, ""),
    ("rank", "now-0", "rank.desync", r"it ended well while rank 0 still had steps to do", ""),
    (
        "worker",
        "raise",
        "rank.exception",
        r"ValueError: sample 51 is no image \(in DataLoader worker process 0\) at .*exits\.py:\d+",
        "ValueError",
    ),
    ("worker", "3", "loader.worker_died", f"{WORKER}3", LOST),
    ("worker", "now-0", "loader.worker_died", f"{WORKER}0", LOST),
)

LIKE_ANOTHER = ("text", "none", "torn-down", "now-0")  # for who has minutes


def test_a_rank_that_fails_before_its_first_batch_is_named(tmp_path: Path) -> None:
    run = launch(tmp_path, [*watchdog(), *torchrun(*script("exits.py", "start", "raise"))])
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (1, "rank.exception", 1), run.err
    assert re.search(r"ValueError: sample 51 is no image at .*exits\.py:\d+", incident["summary"]), incident["summary"]
    assert incident["action"]["checkpoint"] is None


@pytest.mark.parametrize(
    ("where", "how", "kind", "said", "error"),
    [pytest.param(*row, id=f"{row[0]} {row[1]}", marks=[pytest.mark.slow] if row[1] in LIKE_ANOTHER else []) for row in TABLE],
)
def test_each_way_to_end_is_told_as_what_it_is(where: str, how: str, kind: str, said: str, error: str, tmp_path: Path) -> None:
    run = launch(tmp_path, [*watchdog(), *torchrun(*script("exits.py", where, how))])
    (incident,) = run.incidents
    if how == "raise":
        assert "while its loader made the batch of samples" in incident["cause"] and incident["evidence"]["bundle"] is None, incident
    if how == "SystemExit" and re.search(
        TORN_DOWN, incident["summary"]
    ):  # gloo's threads do that now and then, and nothing is left of the status
        kind, said = "rank.desync", TORN_DOWN
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (1, kind, 1), run.err
    assert re.search(said, incident["summary"]), incident["summary"]
    assert incident["action"]["checkpoint"]["committed"], incident["cause"]
    assert ("launcher sees 0" in incident["cause"]) == (how == "256")
    own = re.findall(r"^\[rank1\]: (\w+(?:Error|Exit))\b", run.err, re.MULTILINE)
    assert re.fullmatch(error, own[0] if own else ""), own
    assert "turned itself off" not in run.err and "could not be read" not in run.err
