"""Where the token of a served daemon lies, and who finds it."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_harness import Place

from torch_watchdog.daemon.client import client_of
from torch_watchdog.daemon.token import TOKEN_FILE, kept_token, new_token, token_for
from torch_watchdog.errors import ConfigError, DaemonStartError, NoTokenError

ADDRESS = "127.0.0.1:99470"  # no real port: the daemon of whoever runs this test must not be found


KILLED = f"""
import os
from torch_watchdog.daemon.token import kept_token
with kept_token("old", {ADDRESS!r}, os.environ):
    os._exit(9)
"""


@pytest.fixture
def user(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a user with a runtime folder, and no TMPDIR of the one who tests."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    yield {"XDG_RUNTIME_DIR": str(place.root)}


def token_files(user: dict[str, str]) -> list[Path]:
    return list(Path(user["XDG_RUNTIME_DIR"]).glob("torch-watchdog-*/serve-99470/token"))


def test_a_token_is_found_by_its_port_and_is_gone_with_its_daemon(user: dict[str, str]) -> None:
    with kept_token("secret", ADDRESS, user):
        assert token_for(ADDRESS, user) == token_for("localhost:99470", user) == token_for("[::1]:99470", user) == "secret"
        assert token_for("127.0.0.1:99471", user) is None
    assert token_for(ADDRESS, user) is None and token_files(user) == []


def test_only_this_user_can_read_it(user: dict[str, str]) -> None:
    with kept_token("secret", ADDRESS, user):
        (file,) = token_files(user)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]


def test_a_token_that_others_could_have_put_there_is_not_brought(user: dict[str, str]) -> None:
    with kept_token("secret", ADDRESS, user):
        (file,) = token_files(user)
        file.parent.parent.chmod(0o777)
        assert token_for(ADDRESS, user) is None


@pytest.mark.parametrize("address", ["10.1.2.3:99470", "node-a:99470"])
def test_a_found_token_is_never_sent_to_another_host(user: dict[str, str], address: str) -> None:
    with kept_token("secret", ADDRESS, user):
        assert token_for(address, user) is None


@pytest.mark.parametrize("address", ["unix:/run/daemon.sock", "unix:/run/x:99470"])
def test_a_socket_needs_no_token(user: dict[str, str], address: str) -> None:
    with kept_token("secret", ADDRESS, user):
        assert token_for(address, user) == ""


def test_a_daemon_that_was_killed_leaves_no_token_to_whoever_takes_its_port(user: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", KILLED], env=os.environ | user, timeout=30, check=False)
    assert len(token_files(user)) == 1
    assert token_for(ADDRESS, user) is None
    with kept_token("next", ADDRESS, user):
        assert token_for(ADDRESS, user) == "next"


def test_where_there_is_no_token_nobody_is_asked(user: dict[str, str]) -> None:
    with pytest.raises(NoTokenError, match="watchdog serve"):
        client_of(ADDRESS, user)


def test_a_named_file_takes_its_place_on_both_sides(user: dict[str, str], place: Place) -> None:
    file = place.root / "token"
    file.write_text("named\n")
    user[TOKEN_FILE] = str(file)
    with kept_token(new_token(user), ADDRESS, user):
        assert token_files(user) == []
        assert new_token(user) == token_for(ADDRESS, user) == token_for("node-a:1", user) == "named"
        assert token_for("unix:/run/daemon.sock", user) == ""


def test_two_daemons_have_two_tokens() -> None:
    assert new_token({}) != new_token({}) and len(new_token({})) > 30


@pytest.mark.parametrize("content", [None, b"", b" \n", b"two\nlines", b"\xff\xfe", "caf\u00e9".encode()])
def test_a_named_file_that_holds_no_token_is_an_error_that_names_variable_and_file(place: Place, content: bytes | None) -> None:
    file = place.root / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{TOKEN_FILE}: {file}"):
        token_for(ADDRESS, {TOKEN_FILE: str(file)})


def test_a_daemon_whose_token_cannot_be_kept_does_not_start(user: dict[str, str]) -> None:
    """The same port twice, as in containers that share their folders but not their network: in the first folder, then in /tmp, then nowhere."""
    with contextlib.ExitStack() as stack:
        for token in ("first", "second"):
            stack.enter_context(kept_token(token, ADDRESS, user))
        with pytest.raises(DaemonStartError, match=TOKEN_FILE):
            stack.enter_context(kept_token("third", ADDRESS, user))
