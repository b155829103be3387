"""One job on two machines (network namespaces), two ranks each, through torchrun's and accelerate's own rendezvous: they stop, skip and resume as one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import BIN, Ended, launch, script, torchrun, until, watchdog
from machines import Machine, all_ended, can_make_machines, machines

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_make_machines(), reason="machines are network namespaces: this needs root and `ip netns`"),
]

BAD = 38  # meets rank 3 at step 2, of eight
ROWS = ("--rows", 96, "--fixed-buckets")
C10D = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500")


def static(rank: int) -> tuple[str, ...]:
    return ("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(rank), "--master-addr", "node0", "--master-port", "29511")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(tmp_path, 2) as found:
        yield found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The third step never happens in it: four ranks on one machine."""
    folder = tmp_path_factory.mktemp("reference")
    return launch(folder, torchrun(*script("train.py", *ROWS, "--never", 2, "--out", "digests"), ranks=4))


def on_each(two: list[Machine], folder: Path, options: tuple[str, ...], *words: object, how: object = None, **more: str) -> list[Ended]:
    """The same launch on both machines, with one --dir, to its end."""
    processes = begin(two, folder, options, *words, how=how, **more)
    return all_ended(processes, [folder / machine.name for machine in two])


def begin(
    two: list[Machine], folder: Path, options: tuple[str, ...], *words: object, how: object = None, **more: str
) -> list[subprocess.Popen[str]]:
    commands = [command(folder, rank, options, words, how) for rank in (0, 1)]
    return [machine.start(folder / machine.name, line, **more) for machine, line in zip(two, commands, strict=True)]


def command(folder: Path, rank: int, options: tuple[str, ...], words: tuple[object, ...], how: object = None) -> list[str]:
    meets = static(rank) if how == "static" else C10D
    launched = [str(BIN / "torchrun"), *meets, *script("train.py", *ROWS, *words)]
    return [*watchdog("--job", "job", "--dir", str(folder / "runs"), *options), *launched]


def incidents(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "runs" / "job").glob("incidents/*/incident.json"))]


def ours(run: Ended) -> list[str]:
    return [line for line in run.err.splitlines() if line.startswith("[torch-watchdog]")]


def losses(*runs: Ended) -> set[str]:
    return {line for run in runs for line in run.lines(r"step \d+ loss")}


def digests(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text() for rank in range(4)]


def ranks_training(runs: Path) -> bool:
    return len(list(runs.glob("job/logs/rank-*.log"))) == 4 and all(
        "step 3" in path.read_text() for path in runs.glob("job/logs/rank-*.log")
    )


def test_a_bad_batch_on_one_machine_stops_both_and_the_job_resumes_bit_identically(
    two: list[Machine], tmp_path: Path, reference: Ended
) -> None:
    runs = on_each(two, tmp_path, (), "--bad", BAD)
    assert [run.code for run in runs] == [65, 65], runs[0].err + runs[1].err
    (incident,) = incidents(tmp_path)
    assert incident["origin"]["rank"] == 3 and incident["origin"]["node"] == "node1"  # type: ignore[index]
    action = incident["action"]
    assert sorted(action["ranks_stopped"]) == [0, 1, 2, 3] and action["checkpoint"]["committed"]  # type: ignore[index]
    told, elsewhere = ours(runs[0]), ours(runs[1])
    assert sum("stopped before the bad batch was used" in line for line in told + elsewhere) == 2
    assert any("resume watchdog" in line for line in told) and not any("resume" in line for line in elsewhere)
    assert elsewhere[-1].endswith(f"the whole story is on node node0, in {tmp_path / 'runs' / 'job'}")
    assert list((tmp_path / "runs" / ".nodes").iterdir()) == []
    checkpoint = Path(str(action["checkpoint"]["path"]))  # type: ignore[index]
    (checkpoint / "quarantine.jsonl").unlink()  # the data has been mended
    resumed = on_each(two, tmp_path, ("--resume", str(checkpoint)), "--restore", "--out", tmp_path / "resumed")
    assert [run.code for run in resumed] == [0, 0], resumed[0].err + resumed[1].err
    assert losses(*runs, *resumed) == losses(reference) and losses(*runs).isdisjoint(losses(*resumed))
    assert digests(tmp_path / "resumed") == digests(reference.folder / "digests")


def test_both_machines_skip_the_same_step(two: list[Machine], tmp_path: Path, reference: Ended) -> None:
    runs = on_each(two, tmp_path, ("--policy", "skip"), "--bad", BAD, "--epochs", 1, "--out", tmp_path / "skipped", how="static")
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    kept = {line for line in losses(*runs) if "step 2 " not in line}
    assert kept and {line.partition(" loss ")[2] for line in kept} < {line.partition(" loss ")[2] for line in losses(reference)}
    assert len(set(digests(tmp_path / "skipped"))) <= 4 and incidents(tmp_path)[0]["action"]["policy"] == "skip"  # type: ignore[index]


def test_a_clean_run_says_one_line_at_each_end_and_equals_one_without_us(two: list[Machine], tmp_path: Path) -> None:
    runs = on_each(two, tmp_path, (), "--epochs", 1)
    assert [run.code for run in runs] == [0, 0]
    assert "4 ranks, 8 steps (8 updates), nothing found" in ours(runs[0])[-1] and "whole story is on node node0" in ours(runs[1])[-1]
    plain = launch(tmp_path, torchrun(*script("train.py", *ROWS, "--epochs", 1), ranks=4))
    assert losses(*runs) == losses(plain)


@pytest.mark.parametrize("late", [0, 1])
def test_a_machine_that_comes_late_is_waited_for_as_the_launcher_would(late: int, two: list[Machine], tmp_path: Path) -> None:
    early = two[1 - late].start(tmp_path / two[1 - late].name, command(tmp_path, 1 - late, (), ("--bad", BAD), "static"))
    first_words = tmp_path / two[1 - late].name / "err"
    until(lambda: "[torch-watchdog]" in first_words.read_text(), "the first machine has begun")
    then = two[late].start(tmp_path / two[late].name, command(tmp_path, late, (), ("--bad", BAD), "static"))
    runs = all_ended([early, then], [tmp_path / two[1 - late].name, tmp_path / two[late].name])
    assert [run.code for run in runs] == [65, 65], runs[0].err + runs[1].err
    assert ("waiting for the node at node0" in runs[0].err) == (late == 0)


def test_a_token_that_all_machines_were_given_does_without_a_shared_folder(two: list[Machine], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    processes = []
    for rank, machine in enumerate(two):
        line = command(tmp_path / machine.name, rank, (), ("--bad", BAD))
        processes.append(machine.start(tmp_path / machine.name, line, TORCH_WATCHDOG_TOKEN_FILE=str(token)))
    runs = all_ended(processes, [tmp_path / machine.name for machine in two])
    assert [run.code for run in runs] == [65, 65], runs[0].err + runs[1].err
    assert [path.name for path in (tmp_path / "node1" / "runs" / "job" / "logs").iterdir()] != []
    assert not (tmp_path / "node0" / "runs" / ".nodes").exists()
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != token]
    assert texts and all(b"0123456789abcdef" * 2 not in text for text in texts)


def test_without_a_secret_that_both_have_a_machine_is_only_observed_and_says_why(two: list[Machine], tmp_path: Path) -> None:
    processes = [
        machine.start(tmp_path / machine.name, command(tmp_path / machine.name, rank, (), ("--epochs", 1)))
        for rank, machine in enumerate(two)
    ]
    runs = all_ended(processes, [tmp_path / machine.name for machine in two])
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    (line,) = (line for line in ours(runs[1]) if "only observed" in line)
    assert "TORCH_WATCHDOG_TOKEN_FILE" in line and "policy observe" in runs[1].err


def test_the_death_of_one_machines_wrapper_ends_no_training(two: list[Machine], tmp_path: Path) -> None:
    processes = begin(two, tmp_path, (), "--epochs", 6, "--meet", tmp_path)
    until(lambda: (tmp_path / "here").exists() or any(process.poll() is not None for process in processes), "rank 0 waits")
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    until(lambda: "node.away" in (tmp_path / "runs" / "job" / "events.jsonl").read_text(), "the host has noticed")
    refused = launch(tmp_path, [*watchdog("stop", str(tmp_path / "runs" / "job"))])
    assert refused.code == 1 and "ranks 2, 3 cannot be reached" in refused.err
    (tmp_path / "go").touch()
    (host,) = all_ended(processes[:1], [tmp_path / "node0"])
    assert host.code == 0 and "nothing found" in host.err, host.err
    until(lambda: "rank 3 done" in (tmp_path / "node1" / "out").read_text(), "the ranks of the other machine have ended, too")


def test_a_machine_that_the_network_loses_for_a_while_is_taken_back_and_can_be_stopped(two: list[Machine], tmp_path: Path) -> None:
    for machine in two:  # on a busy machine it stays away for longer than a site usually waits
        (tmp_path / machine.name).mkdir()
        (tmp_path / machine.name / "watchdog.toml").write_text("[rules.hang]\nshortest_s = 300\n")
    processes = begin(two, tmp_path, (), "--epochs", 4000, "--meet", tmp_path)
    until(lambda: (tmp_path / "here").exists() or any(process.poll() is not None for process in processes), "rank 0 waits")
    two[1].unplug()
    (tmp_path / "go").touch()
    events = tmp_path / "runs" / "job" / "events.jsonl"
    until(lambda: "node.away" in events.read_text(), "the host has noticed")
    until(lambda: "cannot be reached" in (tmp_path / "node1" / "err").read_text(), "the other machine has noticed")
    two[1].plug_in()
    until(lambda: "node.back" in events.read_text(), "it is back")

    def stopped() -> bool:
        asked = launch(tmp_path, [*watchdog("stop", str(tmp_path / "runs" / "job"))])
        assert asked.code == 0 or "cannot be reached" in asked.err, asked.err
        return asked.code == 0

    until(stopped, "every rank is told")
    runs = all_ended(processes, [tmp_path / machine.name for machine in two])
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    assert len(list((tmp_path / "runs" / "job" / "checkpoints").glob("*/COMMITTED"))) == 1
    for run in runs:
        assert sum("cannot be reached" in line for line in ours(run)) <= 1
    assert "nothing was lost" in runs[1].err


def test_orders_from_a_machine_that_shares_only_the_folder_reach_the_host(two: list[Machine], tmp_path: Path) -> None:
    """The other machine does not see the socket of the host's daemon, which lies on the host's own disk."""
    private = Path(tempfile.mkdtemp(prefix="tw"))  # a socket's path is short

    def ordered(kind: str) -> subprocess.Popen[str]:
        hidden = ["sh", "-c", f'mount -t tmpfs none "{private}" && exec "$@"', "sh"]
        return two[1].start(tmp_path / kind, [*hidden, *watchdog(kind, str(tmp_path / "runs" / "job"))])

    processes = begin(two, tmp_path, (), "--epochs", 400, "--meet", tmp_path, XDG_RUNTIME_DIR=str(private))
    until(lambda: (tmp_path / "here").exists() or any(process.poll() is not None for process in processes), "rank 0 waits")
    assert json.loads((tmp_path / "runs" / "job" / "job.json").read_text())["daemon"].startswith(f"unix:{private}")
    first = ordered("checkpoint")
    until(lambda: bool((tmp_path / "checkpoint" / "out").read_text()) or first.poll() is not None, "the order is taken")
    (tmp_path / "go").touch()
    (saved,) = all_ended([first], [tmp_path / "checkpoint"])
    assert saved.code == 0 and "verified" in saved.out, saved.out + saved.err
    (stopped,) = all_ended([ordered("stop")], [tmp_path / "stop"])
    assert stopped.code == 0 and "verified" in stopped.out, stopped.out + stopped.err
    runs = all_ended(processes, [tmp_path / machine.name for machine in two])
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    shutil.rmtree(private)


def test_accelerates_own_flags_are_enough(two: list[Machine], tmp_path: Path) -> None:
    processes = []
    for rank, machine in enumerate(two):
        meets = ("--num_machines", "2", "--num_processes", "4", "--machine_rank", str(rank), "--main_process_ip", "node0", "--multi_gpu")
        line = [
            str(BIN / "accelerate"),
            "launch",
            *meets,
            "--main_process_port",
            "29512",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
        ]
        words = [*watchdog("--job", "job", "--dir", str(tmp_path / "runs")), *line, *script("train.py", *ROWS, "--bad", BAD)]
        processes.append(machine.start(tmp_path / machine.name, words, HF_HOME=str(tmp_path)))
    runs = all_ended(processes, [tmp_path / machine.name for machine in two])
    assert [run.code for run in runs] == [65, 65], runs[0].err + runs[1].err
    assert sorted(incidents(tmp_path)[0]["action"]["ranks_stopped"]) == [0, 1, 2, 3]  # type: ignore[index]


def test_one_process_a_machine_finds_the_others_by_torchs_own_variables(two: list[Machine], tmp_path: Path) -> None:
    processes = []
    for rank, machine in enumerate(two):
        words = [*watchdog("--job", "job", "--dir", str(tmp_path / "runs")), str(BIN / "python"), *script("train.py", "--bad", 38)]
        ranks = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29513",
        }
        processes.append(machine.start(tmp_path / machine.name, words, **ranks))
    runs = all_ended(processes, [tmp_path / machine.name for machine in two])
    assert [run.code for run in runs] == [65, 65], runs[0].err + runs[1].err
    assert sorted(incidents(tmp_path)[0]["action"]["ranks_stopped"]) == [0, 1]  # type: ignore[index]


def test_the_port_leaves_no_trace_in_what_the_ranks_get(two: list[Machine], tmp_path: Path) -> None:
    """What a rank may print or log holds no token: it gets none."""
    runs = on_each(two, tmp_path, (), "--epochs", 1)
    record = json.loads((tmp_path / "runs" / "job" / "job.json").read_text())
    assert record["network"].startswith("node0:") and runs[0].code == 0
    assert os.stat(tmp_path / "runs" / ".nodes").st_mode & 0o777 == 0o700
