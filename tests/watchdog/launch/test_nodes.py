"""How the nodes of one launch find each other's daemon: the file that they share, whom it may be read by, and the wait."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog.errors import ConfigError
from torch_watchdog.launch.nodes import Meeting, accelerate_settings, is_host, shared_address
from torch_watchdog.launch.rendezvous import Rendezvous, rendezvous_of
from torch_watchdog_agent.node.agent import NodeAgent
from torch_watchdog_agent.node.config import NodeConfig

AT = Rendezvous(nodes=2, host="127.0.0.1", port=1, node_rank=1)  # nobody answers at this port


def meeting(folder: Path, environment: dict[str, str] | None = None, at: Rendezvous = AT, daemon: str = "auto") -> Meeting:
    return Meeting(at, folder, daemon, environment or {})


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The host's daemon, with its job: address and token."""
    (tmp_path / "run").mkdir(mode=0o700)
    by_socket = f"unix:{tmp_path / 'run' / 'd.sock'}"
    known = DaemonConfig(runs_dir=tmp_path, listen=(by_socket, "127.0.0.1:0"), token="t" * 32)
    with EmbeddedDaemon(known) as daemon:
        host = NodeAgent(
            NodeConfig(
                job="job", node=socket.gethostname(), session="s", policy="skip", command=("train",), run_dir=tmp_path / "job",
                runtime_dir=tmp_path / "run", ring_dir=tmp_path / "run", daemon=by_socket, rendezvous=AT.key,
            ),
            say=print,
        )  # fmt: skip
        host.start()
        yield daemon.addresses[1], "t" * 32
        host.finish(0)


def test_the_hosts_word_is_for_this_user_only_and_is_gone_with_it(tmp_path: Path) -> None:
    with meeting(tmp_path).told("[::]:4711", "secret") as address:
        (file,) = (tmp_path / ".nodes").iterdir()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
        assert (address, shared_address(file)) == ("127.0.0.1:4711", ("127.0.0.1:4711", "secret"))
    assert shared_address(file) is None


def test_a_later_launch_at_the_same_place_is_not_unsaid_by_the_end_of_an_earlier_one(tmp_path: Path) -> None:
    with meeting(tmp_path).told("[::]:1", "first"):
        later = meeting(tmp_path).told("[::]:2", "second")
        later.__enter__()
    (file,) = (tmp_path / ".nodes").iterdir()
    assert shared_address(file) == ("127.0.0.1:2", "second")


@pytest.mark.parametrize("spoil", ["readable", "link", "no json", "absent"])
def test_a_word_that_somebody_else_could_have_left_is_not_taken(spoil: str, tmp_path: Path) -> None:
    with meeting(tmp_path).told("[::]:1", "secret"):
        (file,) = (tmp_path / ".nodes").iterdir()
        match spoil:
            case "readable":
                file.chmod(0o640)
            case "link":
                file.rename(tmp_path / "real")
                file.symlink_to(tmp_path / "real")
            case "no json":
                file.write_text("[")
            case "absent":
                file.unlink()
        assert shared_address(file) is None


def test_a_folder_that_others_can_enter_gets_no_token(tmp_path: Path) -> None:
    (tmp_path / ".nodes").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only this user"):
        meeting(tmp_path).told("[::]:1", "secret").__enter__()
    assert list((tmp_path / ".nodes").iterdir()) == []


def test_a_named_token_leaves_no_file_and_needs_no_shared_folder(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("n" * 40)
    place = meeting(tmp_path / "runs", {"TORCH_WATCHDOG_TOKEN_FILE": str(file)}, Rendezvous(nodes=2, host="n0", port=29500, node_rank=0))
    assert (place.listen(), place.new_token()) == ("[::]:19500", "n" * 40)
    with place.told("[::]:19500", "n" * 40) as address:
        assert address == "n0:19500" and not (tmp_path / "runs").exists()


def test_a_named_token_that_cannot_be_read_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        meeting(tmp_path, {"TORCH_WATCHDOG_TOKEN_FILE": "/nowhere"}).join(is_over=lambda: False, say=print)


def test_a_node_joins_the_hosts_job_with_its_policy_under_a_name_of_its_own(hosted: tuple[str, str], tmp_path: Path) -> None:
    address, token = hosted
    said: list[str] = []
    with meeting(tmp_path).told(address, token):
        found = [meeting(tmp_path).join(is_over=lambda: False, say=said.append) for _ in range(2)]
    answers = [answer for answer, *_ in found if not isinstance(answer, str)]
    name = socket.gethostname()
    assert [(answer.job, answer.session, answer.policy, answer.hosted_by) for answer in answers] == [("job", "s", "skip", name)] * 2
    assert [answer.node for answer in answers] == [f"{name}-2", f"{name}-3"]
    assert [rest for _, *rest in found] == [[address, token]] * 2 and said == []


def test_a_node_goes_without_once_the_launchers_own_rendezvous_has_answered_for_a_while(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        at = dataclasses.replace(AT, port=launcher.getsockname()[1])
        why = dataclasses.replace(meeting(tmp_path, at=at), patience_s=0.3).join(is_over=lambda: False, say=print)
    assert isinstance(why, str) and "TORCH_WATCHDOG_TOKEN_FILE" in why and str(tmp_path / ".nodes") in why


def test_a_node_waits_for_a_host_that_has_not_begun_and_says_so_once_and_a_signal_ends_the_wait(tmp_path: Path) -> None:
    said: list[str] = []
    asked = iter(range(10))
    why = dataclasses.replace(meeting(tmp_path), worth_a_line_s=0.1).join(is_over=lambda: next(asked) == 9, say=said.append)
    assert isinstance(why, str) and len(said) == 1 and "waiting for the node at 127.0.0.1" in said[0]


def test_the_host_is_rank_0_or_whoever_has_the_address() -> None:
    assert is_host(dataclasses.replace(AT, node_rank=0)) and not is_host(AT)
    assert is_host(dataclasses.replace(AT, node_rank=None)) and is_host(dataclasses.replace(AT, node_rank=None, host=socket.gethostname()))
    assert not is_host(dataclasses.replace(AT, node_rank=None, host="192.0.2.77"))


def test_of_several_nodes_on_one_machine_the_one_whose_rank_is_given_as_0_is_the_host_under_c10d_too() -> None:
    def of(host: str, *rank: str) -> Rendezvous:
        found = rendezvous_of(
            ["torchrun", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:99", *rank, "train.py"], {}, {}
        )
        assert found is not None and found.node_rank is None
        return found

    for here in ("127.0.0.1", "localhost", "[::1]"):
        assert [is_host(of(here, "--node-rank", rank)) for rank in ("0", "1")] == [True, False]
    assert is_host(of("127.0.0.1"))
    assert [is_host(of(socket.gethostname(), "--node-rank", rank)) for rank in ("0", "1")] == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "num_machines: 2\nmachine_rank: '1'\nmain_process_ip: 10.0.0.1  \nnested:\n  a: 1\n",
        '{\n  "num_machines": 2,\n  "machine_rank": 1,\n  "main_process_ip": "10.0.0.1"\n}\n',
    ],
)
def test_accelerates_file_is_read_as_yaml_or_json(text: str, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    found = accelerate_settings(["accelerate", "launch", "--config_file", str(file), "train.py"], dict(os.environ))
    assert (found["num_machines"], found["machine_rank"], found["main_process_ip"]) == ("2", "1", "10.0.0.1")
    assert accelerate_settings(["accelerate", "launch", "--config_file", str(tmp_path / "none"), "train.py"], {}) == {}
