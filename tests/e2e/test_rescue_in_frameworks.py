"""A rank is killed in the middle of an epoch: what another saves alone is in the form that the framework itself resumes from, and the resumed run equals one
in which nothing happened. Real launches with two ranks; no dropout, because the generators of the rank that was killed are gone with it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from launching import SCRIPTS, Ended, launch, script, torchrun, watchdog

from torch_watchdog_agent.checkpoint import restore
from torch_watchdog_agent.checkpoint.manifest import verify

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DIES_AT = 8  # of 12 steps in two epochs
ON_GPU = os.environ.get("E2E_DEVICE") == "cuda"


def killed(folder: Path, name: str, *arguments: object, dies: int = 1) -> Ended:
    run = launch(folder, [*watchdog("--job", "killed"), *torchrun(*script(name, "--dropout", 0, "--dies", dies, DIES_AT, *arguments))])
    told = [(one["kind"], one["origin"]["rank"]) for one in run.incidents]
    assert (run.code, told) == (1, [("rank.died", dies)]), run.err
    return run


def saved_by(run: Ended, *, form: str, rank: int = 0) -> Path:
    checkpoint = run.incidents[0]["action"]["checkpoint"]
    assert checkpoint is not None, run.err
    assert (checkpoint["format"], checkpoint["updates_applied"], checkpoint["committed"], checkpoint["saved_by"]) == (
        form, DIES_AT, True, [rank],
    ), run.err  # fmt: skip
    path = run.folder / checkpoint["path"]
    assert verify(path)["kind"] == "rescue"
    return path


def printed(run: Ended, label: str) -> str:
    (line,) = re.findall(rf"\[torch-watchdog\]   {label} +(.*)", run.err)
    return line


def typed(run: Ended) -> Ended:
    """The line that the summary says to type, typed."""
    words = shlex.split(printed(run, "resume"))
    return launch(run.folder, [*watchdog(), *words[1:]])


def losses(run: Ended) -> set[str]:
    return {line for line in run.lines(r"step \d+ loss") if int(line.split()[3]) >= DIES_AT}


def digests(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize(
    ("dies", "more"),
    [
        (0, ("--pretrained", "--save-steps", 3)),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(0, ("--best", "--save-steps", 3), marks=pytest.mark.slow),
        pytest.param(1, ("--accumulate", 2, "--epochs", 4), marks=pytest.mark.slow),
    ],
)
def test_an_unchanged_trainer_goes_on_from_what_one_rank_saved(dies: int, more: tuple[object, ...], tmp_path: Path) -> None:
    """With `resume_from_checkpoint=True`. Where it lives rank 0 writes a Trainer's files, and at times waits for the others in between."""
    run = killed(tmp_path, "train_trainer.py", "--again", "--out", "digests", *more, dies=dies)
    path = saved_by(run, form="transformers", rank=1 - dies)
    assert path == tmp_path / "trained" / f"checkpoint-{DIES_AT}"
    generators = {one.name for one in path.glob("rng_state_*")}
    if "--save-steps" in more or (path.parent / f"replaced.{path.name}").exists():  # it has not saved this step, or was not done with it
        assert generators == {f"rng_state_{1 - dies}.pth"}
    else:  # it has: those of the rank that died are there, too
        assert generators == {"rng_state_0.pth", "rng_state_1.pth"}
    assert not [one.name for one in path.parent.iterdir() if not re.fullmatch(r"checkpoint-\d+|replaced\.checkpoint-8", one.name)]
    resumed = typed(run)
    assert resumed.code == 0, resumed.err
    (tmp_path / "plain").mkdir()
    reference = launch(tmp_path / "plain", torchrun(*script("train_trainer.py", "--dropout", 0, "--out", "digests", *more)))
    assert losses(resumed) == losses(reference) and not losses(run)
    assert digests(tmp_path / "digests") == digests(tmp_path / "plain" / "digests")


def test_the_line_that_is_printed_resumes_a_trainer_whose_script_names_no_checkpoint(tmp_path: Path) -> None:
    run = killed(tmp_path, "train_trainer.py", "--out", "digests", dies=1)
    words = shlex.split(printed(run, "resume"))
    words = words[: words.index("--dies")] + words[words.index("--dies") + 3 :]  # the fault is mended
    resumed = launch(run.folder, [*watchdog(), *words[1:]])
    assert resumed.code == 0, resumed.err
    (tmp_path / "plain").mkdir()
    reference = launch(tmp_path / "plain", torchrun(*script("train_trainer.py", "--dropout", 0, "--out", "digests")))
    assert losses(resumed) == losses(reference)
    assert digests(tmp_path / "digests") == digests(tmp_path / "plain" / "digests")


@pytest.fixture(scope="module")
def killed_accelerate(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return killed(tmp_path_factory.mktemp("killed"), "train_accelerate.py", "--restore", "", "--out", "digests", dies=0)


@pytest.fixture(scope="module")
def whole_accelerate(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return launch(tmp_path_factory.mktemp("whole"), torchrun(*script("train_accelerate.py", "--dropout", 0, "--out", "digests")))


def test_accelerates_own_load_state_takes_what_one_rank_saved(killed_accelerate: Ended, whole_accelerate: Ended, tmp_path: Path) -> None:
    path = saved_by(killed_accelerate, form="accelerate", rank=1)
    assert [one.name for one in path.glob("random_states_*")] == ["random_states_1.pkl"]
    resumed = launch(tmp_path, torchrun(*script("train_accelerate.py", "--dropout", 0, "--load-state", path, "--out", "digests")))
    assert resumed.code == 0, resumed.err
    assert losses(resumed) == losses(whole_accelerate)
    assert digests(tmp_path / "digests") == digests(whole_accelerate.folder / "digests")


@pytest.mark.slow
def test_the_line_that_is_printed_resumes_an_accelerate_loop_that_calls_restore(killed_accelerate: Ended, whole_accelerate: Ended) -> None:
    resumed = typed(killed_accelerate)
    assert resumed.code == 0, resumed.err
    assert losses(resumed) == losses(whole_accelerate)
    assert digests(killed_accelerate.folder / "digests") == digests(whole_accelerate.folder / "digests")


@pytest.mark.parametrize(("who", "form"), [("main", "accelerate"), pytest.param("rank 0", "dcp", marks=pytest.mark.slow)])
def test_a_model_that_a_hook_of_the_scripts_saves_is_there_whoever_runs_it_and_else_torchs_form_is(
    who: str, form: str, whole_accelerate: Ended, tmp_path: Path
) -> None:
    """Rank 0 is gone. A hook that asks torch who it is writes nothing on another rank."""
    run = killed(tmp_path, "train_accelerate.py", "--hooks", who, "--restore", "", "--out", "digests", dies=0)
    path = saved_by(run, form=form, rank=1)
    assert (path / "mine.pt").exists() is (who == "main")
    assert ("it wrote no weights of table.weight, head.weight and 1 more" in run.err) is (who != "main")
    resumed = typed(run)
    assert resumed.code == 0, resumed.err
    assert losses(resumed) == losses(whole_accelerate)
    assert digests(tmp_path / "digests") == digests(whole_accelerate.folder / "digests")


def test_lightning_in_the_middle_of_an_accumulated_step_is_saved_as_torch_does(tmp_path: Path) -> None:
    """Its own counts are of that moment; the state is that of the last update, and the script is told what it needs."""
    run = killed(tmp_path, "train_lightning.py", "--accumulate", 2, "--epochs", 4)
    if ON_GPU:
        return
    path = saved_by(run, form="dcp")
    assert "torch_watchdog_agent.restore(" in printed(run, "call")
    sys.path.append(str(SCRIPTS))
    import train_lightning

    net = train_lightning.Net(None)
    made = net.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    resumed = restore(model=net, optimizer=optimizer, scheduler=scheduler, path=path)
    assert (resumed.step, scheduler.last_epoch) == (DIES_AT, DIES_AT)
    assert run.lines(rf"rank 0 after step {DIES_AT - 1} ")[-1].endswith(train_lightning.digest_of(net, [optimizer]))


@pytest.mark.parametrize(
    ("by_the_script", "more"),
    [pytest.param(*row, marks=pytest.mark.slow) for row in ((True, ()), (False, ()), (True, ("--by-hand",)))],
    ids=["by ckpt_path", "by --resume", "two optimizers"],
)
def test_lightning_goes_on_from_what_one_rank_saved(tmp_path: Path, by_the_script: bool, more: tuple[str, ...]) -> None:
    run = killed(tmp_path, "train_lightning.py", *more)
    if ON_GPU:  # the script waits in tensor.cpu() after each step; two optimizers are not told apart there
        assert re.search(r"nothing was saved: (the device answers to no other thread|its loop has several optimizers)", run.err), run.err
        return
    path = saved_by(run, form="lightning")
    assert f"--resume {path.relative_to(tmp_path)} " in printed(run, "resume")
    given = ("--ckpt", path / "lightning.ckpt") if by_the_script else ()
    ours = ("--job", "again", *(() if by_the_script else ("--resume", str(path))))
    resumed = launch(tmp_path, [*watchdog(*ours), *torchrun(*script("train_lightning.py", "--dropout", 0, *more, *given))])
    assert resumed.code == 0, resumed.err
    assert resumed.err.count("finds no random state of its own in") == 1
    reference = launch(tmp_path, torchrun(*script("train_lightning.py", "--dropout", 0, *more)))
    steps = {line for line in reference.lines(r"after step") if int(line.split()[4]) >= DIES_AT}
    assert set(resumed.lines(r"after step")) == steps and len(steps) == 8


@pytest.mark.parametrize("more", [(), ("--own",)], ids=["torch's generator", "the loader's own"])
def test_a_rank_that_shuffles_by_itself_under_lightning_takes_anothers_order_for_one_epoch_and_says_so(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """That epoch it had taken in silence, and with a generator of the loader's all that follow."""
    failed = launch(tmp_path, [*watchdog("--job", "failed"), *torchrun(*script("own_order_lightning.py", "--fails", *more))])
    path = tmp_path / failed.incidents[0]["action"]["checkpoint"]["path"]
    resumed = launch(tmp_path, [*watchdog("--job", "again", "--resume", str(path)), *torchrun(*script("own_order_lightning.py", *more))])
    assert resumed.code == 0, resumed.err
    order = {
        (rank, epoch): [line.split()[-1] for line in resumed.lines(rf"rank {rank} epoch {epoch} ")] for rank in (0, 1) for epoch in (1, 2)
    }
    assert order[0, 1] == order[1, 1] and len(order[1, 1]) == 5
    assert order[0, 2] != order[1, 2] and len(order[1, 2]) == 8
    assert re.findall(r"(rank \d): it shuffles its data by another seed than (rank \d), which saved.*rest of epoch (\d)", resumed.err) == [
        ("rank 1", "rank 0", "1")
    ], resumed.err
