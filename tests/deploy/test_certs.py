"""`watchdog certs`: a daemon with a certificate of a site's authority, for gRPC and for the page; wrong and expired ones are refused."""

from __future__ import annotations

import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from fleet_harness import until

from torch_watchdog.certificates import make_certificates
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import Certificate, DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog.errors import DaemonStartError, DaemonUnreachableError

EVERYWHERE = "0.0.0.0"  # TLS; a connection to it stays on this machine
TOKEN = "t" * 43


def daemon(folder: Path, certs: Path, *, say: Callable[[str], None] = lambda _: None, **more: object) -> EmbeddedDaemon:
    certificate = Certificate(certificate_file=certs / "daemon.crt", key_file=certs / "daemon.key")
    known = {"listen": (f"{EVERYWHERE}:0",), "web": f"{EVERYWHERE}:0", "token": TOKEN, "certificate": certificate}
    return EmbeddedDaemon(DaemonConfig(runs_dir=folder / "runs", **known | more), say=say)  # type: ignore[arg-type]


def test_who_trusts_the_authority_reaches_the_daemon_and_the_page(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["watchdog.example.org", EVERYWHERE], days=10)
    assert [stat.S_IMODE((certs / name).stat().st_mode) for name in ("ca.key", "daemon.key")] == [0o600, 0o600]
    authority = (certs / "ca.crt").read_bytes()
    with daemon(tmp_path, certs) as running:
        with DaemonClient(running.addresses[0], token=TOKEN, authority=authority) as client:
            assert client.jobs() == ()
        trusting = ssl.create_default_context(cafile=str(certs / "ca.crt"))
        answer = httpx.get(f"{running.addresses[1]}healthz", verify=trusting)
        assert running.addresses[1].startswith("https://") and answer.status_code == 200
        assert "max-age" in answer.headers["strict-transport-security"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.addresses[1]}healthz")


def test_with_a_certificate_the_page_is_https_on_this_machine_too(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, [EVERYWHERE, "127.0.0.1"], days=10)
    with daemon(tmp_path, certs, web="127.0.0.1:0") as running:
        address = running.addresses[1]
        trusting = ssl.create_default_context(cafile=str(certs / "ca.crt"))
        assert address.startswith("https://127.0.0.1:") and httpx.get(f"{address}healthz", verify=trusting).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{address.replace('https', 'http')}healthz")


@pytest.mark.parametrize("wrong", ["another authority", "expired", "another host"])
def test_a_wrong_certificate_is_refused_by_the_caller(tmp_path: Path, wrong: str) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["elsewhere.example.org" if wrong == "another host" else EVERYWHERE], days=0 if wrong == "expired" else 10)
    trusted = tmp_path / "other" if wrong == "another authority" else certs
    make_certificates(trusted, [EVERYWHERE], days=1) if trusted != certs else None
    with daemon(tmp_path, certs) as running:
        client = DaemonClient(running.addresses[0], token=TOKEN, timeout_s=3, authority=(trusted / "ca.crt").read_bytes())
        words = {"another host": "is for another name", "expired": "has expired", "another authority": "CA_FILE must name the ca.crt"}
        with client, pytest.raises(DaemonUnreachableError, match=words[wrong]):
            client.jobs()


def served_serial(address: str) -> int:
    """Of the certificate that a TLS port shows to a new caller."""
    host, port = address.removeprefix("https://").rstrip("/").rsplit(":", 1)
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port)), timeout=10).encode()).serial_number


def test_a_renewed_certificate_is_shown_to_new_callers_and_those_who_are_there_stay(tmp_path: Path) -> None:
    certs, said = tmp_path / "certs", list[str]()
    make_certificates(certs, [EVERYWHERE], days=1)
    with daemon(tmp_path, certs, say=said.append) as running:
        with DaemonClient(running.addresses[0], token=TOKEN, authority=(certs / "ca.crt").read_bytes()) as client:
            client.jobs()
            before = [served_serial(address) for address in running.addresses]
            make_certificates(certs, [EVERYWHERE], days=10)
            renewed = x509.load_pem_x509_certificate((certs / "daemon.crt").read_bytes()).serial_number
            assert before == [before[0]] * 2 != [renewed] * 2
            until(lambda: [served_serial(address) for address in running.addresses] == [renewed] * 2)
            assert client.jobs() == ()
        with DaemonClient(running.addresses[0], token=TOKEN, authority=(certs / "ca.crt").read_bytes()) as another:
            assert another.jobs() == ()
    assert len([line for line in said if "was renewed and is in use" in line]) == 1


def test_half_a_renewal_leaves_the_certificate_before_in_use_and_is_said_once(tmp_path: Path) -> None:
    certs, said = tmp_path / "certs", list[str]()
    make_certificates(certs, [EVERYWHERE], days=1)
    with daemon(tmp_path, certs, say=said.append) as running:
        before = served_serial(running.addresses[0])
        make_certificates(tmp_path / "other", [EVERYWHERE], days=1)
        (certs / "daemon.key").write_bytes((tmp_path / "other" / "daemon.key").read_bytes())
        assert [served_serial(running.addresses[0]) for _ in range(3)] == [before] * 3
        (certs / "daemon.key").unlink()
        assert served_serial(running.addresses[0]) == before
    assert [line for line in said if "the one before stays in use" in line] != [] and len(said) <= 2


def test_an_authority_that_is_there_signs_the_next_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["a"], days=1)
    before = (tmp_path / "ca.crt").read_bytes()
    made = make_certificates(tmp_path, ["b"], days=1)
    assert (tmp_path / "ca.crt").read_bytes() == before and [path.name for path in made] == ["daemon.key", "daemon.crt"]


@pytest.mark.parametrize("kept", ["no key", "the key of an authority before"])
def test_an_authority_whose_key_is_not_there_is_never_replaced(tmp_path: Path, kept: str) -> None:
    make_certificates(tmp_path, ["a"], days=1)
    (tmp_path / "ca.key").unlink()
    if kept != "no key":
        make_certificates(tmp_path / "before", ["a"], days=1)
        (tmp_path / "ca.key").write_bytes((tmp_path / "before" / "ca.key").read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    command = [sys.executable, "-m", "torch_watchdog.cli", "certs", "--out", str(tmp_path), "b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ca.key" in done.stderr and "bring the authority's own key back" in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == before


def test_a_daemon_whose_key_is_gone_says_so(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", ["a"], days=1)
    (tmp_path / "certs" / "daemon.key").unlink()
    with pytest.raises(DaemonStartError, match="cannot be read"), daemon(tmp_path, tmp_path / "certs"):
        pass
