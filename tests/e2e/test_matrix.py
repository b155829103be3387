"""Forms of training against places of a bad batch: a stop resumes bit-identically, a skip equals a run in which every rank left the step out."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from launching import BIN, Ended, launch, script, torchrun, watchdog

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

# Of rank r's batch in step s (two ranks, four samples a batch): sample 8 s + r. Eight steps an epoch.
MIDDLE, MIDDLE_OF_THE_OTHER, NEXT, LAST, FIRST, SECOND = 8 * 4, 8 * 4 + 1, 8 * 5 + 1, 8 * 7 + 1, 1, 9


def run(folder: Path, name: str, *words: object, ours: tuple[str, ...] | None = (), ranks: int = 2) -> Ended:
    """A launch in a folder of its own, under the watchdog unless `ours` is None."""
    (folder / name).mkdir()
    command = torchrun(*script("matrix.py", *words, "--out", "digests"), ranks=ranks)
    return launch(folder / name, command if ours is None else [*watchdog("--job", "job", *ours), *command])


def digests(ended: Ended) -> list[str]:
    return [path.read_text() for path in sorted((ended.folder / "digests").iterdir())]


def checkpoint(ended: Ended) -> Path:
    (incident,) = ended.incidents
    action = incident["action"]
    assert action["checkpoint"]["committed"] and action["prevented"], incident
    return ended.folder / str(action["checkpoint"]["path"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_stop_resumes_and_a_skip_goes_on_as_if_the_step_had_never_been(kind: str, tmp_path: Path) -> None:
    stopped = run(tmp_path, "stopped", "--kind", kind, "--bad", MIDDLE)
    assert stopped.code == 65, stopped.err
    place = checkpoint(stopped)
    reference = run(tmp_path, "reference", "--kind", kind, "--never", 4, ours=None)
    (place / "quarantine.jsonl").unlink()  # the data has been mended
    resumed = run(tmp_path, "resumed", "--kind", kind, "--restore", ours=("--resume", str(place)))
    assert (resumed.code, reference.code) == (0, 0), resumed.err
    assert digests(resumed) == digests(reference)
    skipped = run(tmp_path, "skipped", "--kind", kind, "--bad", MIDDLE, "--rows", 64, ours=("--policy", "skip"))
    assert skipped.code == 0, skipped.err
    # In the second epoch a neighbour stands in for the sample: the first is what can be compared, by its losses.
    first = [line for rank in (0, 1) for line in [one for one in skipped.out.splitlines() if one.startswith(f"rank {rank} loss")][:8]]
    of_reference = [
        line for rank in (0, 1) for line in [one for one in reference.out.splitlines() if one.startswith(f"rank {rank} loss")][:7]
    ]
    assert set(of_reference) <= set(first) and len(set(first) - set(of_reference)) <= 2


@pytest.mark.parametrize(
    ("bad", "never", "more"),
    [
        ((MIDDLE, MIDDLE_OF_THE_OTHER), (4,), ()),  # on both ranks at once
        ((LAST,), (7,), ()),  # the last batch of an epoch
        ((MIDDLE, NEXT), (4, 5), ()),  # twice in a row, on different ranks
        ((MIDDLE,), (2,), ("--micro", 2)),  # the first micro-step of a step
        ((NEXT,), (2,), ("--micro", 2)),  # the second one
    ],
)
def test_wherever_the_bad_batch_is_a_skip_equals_a_run_without_its_step(
    bad: tuple[int, ...], never: tuple[int, ...], more: tuple[object, ...], tmp_path: Path
) -> None:
    """The second epoch is spared the sample by leaving out the same step there, in both runs."""
    skipped = run(tmp_path, "skipped", "--bad", *bad, *more, ours=("--policy", "skip"))
    assert skipped.code == 0, skipped.err
    reference = run(tmp_path, "reference", "--never", *never, *more, ours=None)
    per_epoch = 8 - len(never) * (2 if more else 1)
    for rank in (0, 1):
        ours = [line for line in skipped.out.splitlines() if line.startswith(f"rank {rank} loss")]
        theirs = [line for line in reference.out.splitlines() if line.startswith(f"rank {rank} loss")][:per_epoch]
        assert [line for line in ours[:8] if line in theirs] == theirs


def test_on_four_ranks_with_two_bad_ones_the_step_is_left_out_everywhere(tmp_path: Path) -> None:
    skipped = run(tmp_path, "skipped", "--rows", 128, "--bad", 64, 67, ours=("--policy", "skip"), ranks=4)
    reference = run(tmp_path, "reference", "--rows", 128, "--never", 4, ours=None, ranks=4)
    assert (skipped.code, reference.code) == (0, 0), skipped.err
    for rank in range(4):
        ours = [line for line in skipped.out.splitlines() if line.startswith(f"rank {rank} loss")][:8]
        theirs = [line for line in reference.out.splitlines() if line.startswith(f"rank {rank} loss")][:7]
        assert [line for line in ours if line in theirs] == theirs


@pytest.mark.parametrize(
    ("ranks", "words", "sample"),
    [(2, ("--bad", FIRST), 1), (4, ("--bad", FIRST), 1), (2, ("--evaluate-first", "--bad-evaluation", 9), 9)],
)
def test_before_anything_was_learned_all_ranks_end_with_the_diagnosis_and_the_next_run_leaves_the_sample_out(
    ranks: int, words: tuple[object, ...], sample: int, tmp_path: Path
) -> None:
    """In the very first step, and in an evaluation before it: refused inside the forward; no update was applied, so there is nothing to save."""
    stopped = run(tmp_path, "stopped", *words, "--rows", 128, ranks=ranks)
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    assert (incident["step"], incident["action"]["prevented"], incident["batch"]["value"]) == (0, True, 51)
    assert (incident["origin"]["rank"], incident["batch"]["sample"]["dataset_index"]) == (1, sample)
    assert all(len(stopped.lines(f"rank {rank} loss")) <= 1 for rank in range(ranks)) and not stopped.lines("done")
    assert not list(stopped.run_dir.glob("checkpoints/*"))
    (again,) = (line.partition("again  ")[2] for line in stopped.err.splitlines() if "  again  " in line)
    trained = launch(stopped.folder, [str(BIN / "watchdog"), "--job", "again", *shlex.split(again)[1:]])
    assert trained.code == 0 and len(trained.lines("done")) == ranks, trained.err


def test_in_the_second_step_already_the_stop_is_clean(tmp_path: Path) -> None:
    stopped = run(tmp_path, "stopped", "--bad", SECOND)
    assert stopped.code == 65 and checkpoint(stopped).name == "step-1", stopped.err


def test_in_an_evaluation_the_bad_batch_is_named_and_kept_from_the_model(tmp_path: Path) -> None:
    stopped = run(tmp_path, "stopped", "--bad-evaluation", 9)
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    assert (incident["batch"]["value"], incident["batch"]["sample"]["dataset_index"], incident["action"]["prevented"]) == (51, 9, True)
    assert "It is a batch of an evaluation, of " in incident["cause"]


def test_a_tensor_parallel_pair_that_has_one_bad_batch_stops_as_one_and_resumes(tmp_path: Path) -> None:
    stopped = run(tmp_path, "stopped", "--kind", "tp", "--rows", 32, "--bad", 4 * 4)
    assert stopped.code == 65, stopped.err
    place = stopped.folder / str(stopped.incidents[0]["action"]["checkpoint"]["path"])
    assert sorted(stopped.incidents[0]["action"]["ranks_stopped"]) == [0, 1]
    (place / "quarantine.jsonl").unlink()
    resumed = run(tmp_path, "resumed", "--kind", "tp", "--rows", 32, "--restore", ours=("--resume", str(place)))
    reference = run(tmp_path, "reference", "--kind", "tp", "--rows", 32, "--never", 4, ours=None)
    assert (resumed.code, reference.code) == (0, 0), resumed.err
    assert digests(resumed) == digests(reference)


def test_beside_an_asynchronous_checkpoint_of_the_scripts_own_both_are_whole(tmp_path: Path) -> None:
    stopped = run(tmp_path, "stopped", "--bad", MIDDLE, "--async-save", "theirs")
    assert stopped.code == 65, stopped.err
    assert checkpoint(stopped).is_dir() and (stopped.folder / "theirs" / ".metadata").exists()
