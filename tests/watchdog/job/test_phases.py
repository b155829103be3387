"""Steps of every length, and what lies between steps: none of it is a hang, and a rank that is late in one of them is said to be in it."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from torch_watchdog.job.hangs import MIN_GAPS, HangWatch, Hung
from torch_watchdog.job.phases import phase_in
from torch_watchdog_proto.rescue_words import Looked

SITE = "/usr/lib/python3/site-packages"


def stack(*frames: tuple[str, str]) -> str:
    return "".join(f'  File "{file}", line 7, in {function}\n    pass\n' for file, function in frames)


MAIN = ("/home/me/train.py", "main")
SAVES = stack(MAIN, ("/home/me/train.py", "save_checkpoint"))
EVALUATES = stack(MAIN, ("/home/me/train.py", "evaluate"), ("/home/me/model.py", "forward"))


@pytest.mark.parametrize(
    ("file", "phase"),
    [
        ("torch/_inductor/compile_fx.py", "compiles"),
        ("torch/_dynamo/convert_frame.py", "compiles"),
        ("torch/serialization.py", "writes a checkpoint"),
        ("torch/distributed/checkpoint/state_dict_saver.py", "writes a checkpoint"),
        ("safetensors/torch.py", "writes a checkpoint"),
        ("torch/utils/data/dataloader.py", "waits for data"),
    ],
)
def test_a_phase_is_known_by_files_that_are_there(file: str, phase: str) -> None:
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    assert spec is not None and (Path(spec.submodule_search_locations[0]) / rest).is_file()  # type: ignore[index]
    assert phase_in(stack(MAIN, (f"{SITE}/{file}", "f"))) == phase


@pytest.mark.parametrize(
    ("functions", "phase"),
    [
        (("save",), "writes a checkpoint"),
        (("_save_checkpoint", "barrier"), "writes a checkpoint"),
        (("evaluation_loop", "forward"), "evaluates"),
        (("validate",), "evaluates"),
        (("train", "saved_value"), None),
        (("train", "forward"), None),
    ],
)
def test_a_phase_is_known_by_the_name_of_its_function(functions: tuple[str, ...], phase: str | None) -> None:
    assert phase_in(stack(MAIN, *(("/home/me/x.py", function) for function in functions))) == phase


class Job:
    """Two ranks and a clock that ticks four times a second, as the daemon's; what is asked is answered from `stacks`, by rank; None: waits in a collective."""

    def __init__(self) -> None:
        self.watch, self.now, self.asked, self.told = HangWatch({}), 0.0, 0, list[Hung]()

    def steps(self, lengths: list[float]) -> None:
        for length in lengths:
            self.pass_time(length, {0: EVALUATES, 1: None})
            self.watch.progressed(self.now, (length,))

    def pass_time(self, seconds: float, stacks: dict[int, str | None]) -> None:
        until = self.now + seconds
        while self.now + 0.25 < until:
            self.now += 0.25
            if self.watch.should_ask(self.now):
                self.asked += 1
                self.watch.asked(frozenset(stacks), self.asked, self.now)
                for rank, text in stacks.items():
                    waits = text is None
                    self.watch.answered(Looked(rank=rank, generation=self.asked, waits=waits, stack=text or SAVES, timeout_s=600.0))
            verdict = self.watch.verdict(self.now)
            self.told += [verdict] if verdict is not None else []
        self.now = until


@pytest.mark.parametrize("shortest_s", [0.01, 0.2, 1.0, 3.0, 30.0])
def test_steps_that_vary_five_times_with_the_length_of_their_sequences_never_make_anybody_ask(shortest_s: float) -> None:
    job, rng = Job(), random.Random(0)
    job.steps([shortest_s * rng.choice([1, 1, 1, 1, 2, 3, 5]) for _ in range(400)])
    assert (job.asked, job.told) == (0, [])


def test_a_first_step_that_compiles_for_ten_minutes_makes_nobody_ask() -> None:
    job = Job()
    job.watch.progressed(0.0)
    job.pass_time(600.0, {0: stack(MAIN, (f"{SITE}/torch/_inductor/compile_fx.py", "f")), 1: None})
    assert MIN_GAPS > 1 and job.asked == 0


@pytest.mark.parametrize(
    "stacks", [dict.fromkeys((0, 1), EVALUATES), {0: stack(MAIN, (f"{SITE}/torch/utils/data/dataloader.py", "f")), 1: EVALUATES}]
)
def test_an_evaluation_or_the_end_of_an_epoch_in_which_nobody_waits_is_told_of_nobody(stacks: dict[int, str | None]) -> None:
    job = Job()
    job.steps([0.5] * 50)
    job.pass_time(300.0, stacks)
    assert job.asked > 0
    assert job.told == []


def test_an_evaluation_whose_batches_are_seen_makes_nobody_ask() -> None:
    job = Job()
    job.steps([0.5] * 50)
    for _ in range(100):
        job.pass_time(3.0, {0: EVALUATES, 1: None})
        job.watch.progressed(job.now)
    assert job.asked == 0


def test_a_checkpoint_for_which_the_others_wait_is_said_to_be_one_and_frees_nobody_and_the_next_as_long_is_usual() -> None:
    job = Job()
    job.steps([0.5] * 50)
    job.pass_time(90.0, {0: SAVES, 1: None})
    (told,) = job.told
    assert (told.ranks, told.waiting, told.sure) == ((0,), (1,), False)
    assert 'it is not in a collective: it writes a checkpoint, in File "/home/me/train.py", line 7, in save_checkpoint' in told.why
    job.watch.progressed(job.now, (90.0,))
    asked = job.asked
    job.steps([0.5] * 30)
    job.pass_time(150.0, {0: SAVES, 1: None})
    assert (job.asked, len(job.told)) == (asked, 1)


def test_a_rank_that_compiles_again_in_the_middle_is_said_to() -> None:
    job = Job()
    job.steps([0.5] * 50)
    job.pass_time(60.0, {0: stack(MAIN, (f"{SITE}/torch/_dynamo/convert_frame.py", "f")), 1: None})
    assert [(told.sure, "it compiles" in told.why) for told in job.told] == [(False, True)]
