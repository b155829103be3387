"""`watchdog replay`: what it says before it runs, and in which environment the script runs. The script here trains nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from torch_watchdog.cli.main import watchdog
from torch_watchdog.config import LaunchConfig

SHOWN = ("WORLD_SIZE", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES")
SCRIPT = f"import json, os, sys\nprint(json.dumps([os.environ.get(name) for name in {SHOWN}]))\nsys.exit(int(sys.argv[1]))\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Of rank 3 in a run whose model has a ctc_loss; one tensor holds a NaN."""
    (tmp_path / "bundles").mkdir()
    (tmp_path / "contract").mkdir()
    (tmp_path / "contract" / "rank-3.json").write_text(json.dumps({"guarded": [{"op": "ctc_loss"}], "opaque": []}))
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.json").write_text(json.dumps({"command": ["torchrun", "--nproc-per-node", "4", str(tmp_path / "train.py"), "7"]}))
    for number, name in ((1, "0-1.safetensors"), (2, "0-3-step-12.safetensors")):
        (tmp_path / "incidents" / str(number)).mkdir(parents=True)
        told = {"summary": f"rank 3, step 12: of {name}", "evidence": {"bundle": f"bundles/{name}"}}
        (tmp_path / "incidents" / str(number) / "incident.json").write_text(json.dumps(told))
    path = tmp_path / "bundles" / "0-3-step-12.safetensors"
    save_file({"age": numpy.array([1.0, numpy.nan], dtype=numpy.float32), "ids": numpy.array([1, 2])}, path)
    return path


def replayed(*words: object) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in SHOWN and not name.startswith("TORCH_WATCHDOG")}
    return subprocess.run(
        [sys.executable, "-m", "torch_watchdog.cli", "replay", *map(str, words)], env=kept, capture_output=True, text=True, timeout=60
    )


def test_on_the_cpu_it_says_where_that_may_mislead_and_ends_as_the_script_does(bundle: Path) -> None:
    done = replayed(bundle)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == ["1", None, ""]
    told = [line for line in done.stderr.splitlines() if line.startswith("[torch-watchdog] on the CPU: ")]
    assert len(told) == 3
    assert "ctc_loss" in told[0] and "age holds NaN" in told[1] and "second device" in told[2]


@pytest.mark.parametrize("carried_off", [False, True])
def test_what_it_says_at_its_end_names_a_folder_that_is_there(bundle: Path, carried_off: bool) -> None:
    if carried_off:
        (bundle.parent.parent / "job.json").unlink()
    done = replayed(bundle, "--", bundle.parent.parent / "train.py", 7)
    named = re.search(r"files in (\S+)", done.stderr)
    assert named is not None, done.stderr
    assert (Path(named[1]) / "job.json").exists()
    assert Path(named[1]).parent == (bundle.parent if carried_off else bundle.parent.parent) / "replays"


def test_before_it_runs_the_jobs_own_arguments_it_says_what_they_may_write_to_and_how_to_give_others(bundle: Path) -> None:
    script, word = bundle.parent.parent / "train.py", "files that the script writes under them are appended to or overwritten"
    told = f"{word}; with others: watchdog replay {bundle} -- {script} ARGS\n"
    before, _, _ = replayed(bundle).stderr.partition("files in ")
    assert told in before
    with_others = replayed(bundle, "--", script, 5)
    assert with_others.returncode == 5 and word not in with_others.stderr


def test_a_launcher_is_left_out_for_a_replay_is_one_process(bundle: Path) -> None:
    done = replayed(bundle, "--", "torchrun", "--nproc-per-node", 2, bundle.parent.parent / "train.py", 7)
    assert (done.returncode, json.loads(done.stdout)) == (7, ["1", None, ""]), done.stderr
    assert "a replay is one process: train.py is run without its launcher" in done.stderr
    unknown = replayed(bundle, "--", "accelerate", "launch", "-m", "package.train")
    assert unknown.returncode == 2 and "say the script alone" in unknown.stderr


def test_it_says_what_the_batch_was_recorded_for(bundle: Path) -> None:
    told = [line for line in replayed(bundle).stderr.splitlines() if "recorded for" in line]
    assert told == ["[torch-watchdog] recorded for: rank 3, step 12: of 0-3-step-12.safetensors"]


@pytest.mark.parametrize("is_first", [True, False])
def test_with_cuda_every_kernel_is_waited_for_and_nothing_is_doubted(bundle: Path, is_first: bool) -> None:
    done = replayed(*(("--cuda", bundle) if is_first else (bundle, "--cuda")), "--", bundle.parent.parent / "train.py", 5)
    assert done.returncode == 5, done.stderr
    assert json.loads(done.stdout) == ["1", "1", None]
    assert "on the CPU" not in done.stderr


def test_a_jobs_name_or_run_directory_is_answered_with_its_bundles(bundle: Path) -> None:
    run = bundle.parent.parent
    for named in (run, bundle.parent):
        done = replayed(named)
        assert done.returncode == 2 and f"a replay takes one bundle of it: watchdog replay {bundle}" in done.stderr
    by_name = subprocess.run(
        [sys.executable, "-m", "torch_watchdog.cli", "--dir", str(run.parent), "replay", run.name],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert by_name.returncode == 2 and f"watchdog replay {bundle}" in by_name.stderr
    bundle.unlink()
    assert "is a run directory without a bundle" in replayed(run).stderr
    nothing = replayed("nope")
    assert nothing.returncode == 2 and "there is no file 'nope': BUNDLE is one of a run directory" in nothing.stderr


def test_of_several_bundles_that_of_an_incident_comes_first_with_its_rank_step_and_sample(bundle: Path) -> None:
    told = {
        "origin": {"rank": 3},
        "step": 12,
        "batch": {"sample": {"dataset_index": 333}},
        "evidence": {"bundle": f"bundles/{bundle.name}"},
    }
    (bundle.parent.parent / "incidents" / "2" / "incident.json").write_text(json.dumps(told))
    (bundle.parent / "0-0.safetensors").write_bytes(bundle.read_bytes())
    said = replayed(bundle.parent.parent).stderr
    assert f"{bundle.name} (rank 3, step 12, dataset sample 333), watchdog replay" in said
    assert "0-0.safetensors (of rank 0, which no incident is laid to)" in said


def test_a_torn_file_is_no_reason_to_stay_silent(bundle: Path) -> None:
    bundle.write_bytes(bundle.read_bytes()[:20])
    assert "second device" in replayed(bundle).stderr


def test_a_launch_that_was_recorded_without_its_secrets_is_asked_for_them(bundle: Path) -> None:
    script = str(bundle.parent.parent / "train.py")
    (bundle.parent.parent / "job.json").write_text(json.dumps({"command": ["torchrun", script, "7", "--hf_token", "***"]}))
    done = replayed(bundle)
    assert done.returncode == 2 and "recorded without its secrets" in done.stderr
    assert replayed(bundle, "--", script, "7", "--hf_token", "abcdef0123456789").returncode == 7


@pytest.mark.parametrize("is_replay", [True, False])
def test_a_replay_alerts_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_replay: bool) -> None:
    """Neither itself nor by a central daemon: it fails on purpose."""
    launched = list[LaunchConfig]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_WATCHDOG_ALERT", "json://127.0.0.1:9/x")
    monkeypatch.setenv("TORCH_WATCHDOG_DAEMON", "127.0.0.1:9470")
    monkeypatch.setattr("torch_watchdog.launch.run.launch", lambda config, _words, **_: launched.append(config))
    more = ["--replay", str(tmp_path / "0-3.safetensors")] if is_replay else []
    watchdog.main(["run", *more, "--", "python", "train.py"], standalone_mode=False)
    (config,) = launched
    assert (config.alerts, config.daemon) == (((), "auto") if is_replay else (("json://127.0.0.1:9/x",), "127.0.0.1:9470"))
