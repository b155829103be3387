"""What a replay runs."""

from __future__ import annotations

import pytest

from torch_watchdog.replay.plan import doubts, environment_of, script_of


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (("torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1"), ("train.py", "--lr", "1")),
        (("python", "-u", "dir/train.py"), ("dir/train.py",)),
        (("accelerate", "launch", "-m", "package.train"), ()),
    ],
)
def test_the_script_of_a_launch(command: tuple[str, ...], script: tuple[str, ...]) -> None:
    assert script_of(command) == script


def test_it_is_one_rank_of_one_on_the_cpu_or_waits_for_every_kernel() -> None:
    on_cpu = environment_of({"PATH": "p", "WORLD_SIZE": "8"}, cuda=False, port=1)
    assert (on_cpu["PATH"], on_cpu["WORLD_SIZE"], on_cpu["CUDA_VISIBLE_DEVICES"]) == ("p", "1", "")
    on_gpu = environment_of({}, cuda=True, port=1)
    assert on_gpu["CUDA_LAUNCH_BLOCKING"] == "1" and "CUDA_VISIBLE_DEVICES" not in on_gpu


def test_what_the_cpu_may_tell_otherwise_is_said_for_what_is_in_the_batch_and_in_the_training() -> None:
    (always,) = doubts(ops={"embedding"}, not_finite=[])
    assert "second device" in always
    by_ctc, by_nan, _ = doubts(ops={"embedding", "ctc_loss"}, not_finite=["age"])
    assert "ctc_loss" in by_ctc and "garbage" in by_ctc
    assert by_nan.startswith("age holds NaN")
