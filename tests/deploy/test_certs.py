"""`watchdog certs`: a daemon with a certificate of a site's authority, for gRPC and for the page; wrong and expired ones are refused."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import httpx
import pytest

from torch_watchdog.certificates import make_certificates
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import Certificate, DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog.errors import DaemonStartError, DaemonUnreachableError

EVERYWHERE = "0.0.0.0"  # TLS; a connection to it stays on this machine
TOKEN = "t" * 43


def daemon(folder: Path, certs: Path, **more: object) -> EmbeddedDaemon:
    certificate = Certificate(certificate_file=certs / "daemon.crt", key_file=certs / "daemon.key")
    known = {"listen": (f"{EVERYWHERE}:0",), "web": f"{EVERYWHERE}:0", "token": TOKEN, "certificate": certificate}
    return EmbeddedDaemon(DaemonConfig(runs_dir=folder / "runs", **known | more), say=lambda _: None)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("wrong", ["another authority", "expired", "another host"])
def test_a_wrong_certificate_is_refused_by_the_caller(tmp_path: Path, wrong: str) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["elsewhere.example.org" if wrong == "another host" else EVERYWHERE], days=0 if wrong == "expired" else 10)
    trusted = tmp_path / "other" if wrong == "another authority" else certs
    make_certificates(trusted, [EVERYWHERE], days=1) if trusted != certs else None
    with daemon(tmp_path, certs) as running:
        client = DaemonClient(running.addresses[0], token=TOKEN, timeout_s=3, authority=(trusted / "ca.crt").read_bytes())
        with client, pytest.raises(DaemonUnreachableError):
            client.jobs()


def test_an_authority_that_is_there_signs_the_next_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["a"], days=1)
    before = (tmp_path / "ca.crt").read_bytes()
    made = make_certificates(tmp_path, ["b"], days=1)
    assert (tmp_path / "ca.crt").read_bytes() == before and [path.name for path in made] == ["daemon.key", "daemon.crt"]


def test_a_daemon_whose_key_is_gone_says_so(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", ["a"], days=1)
    (tmp_path / "certs" / "daemon.key").unlink()
    with pytest.raises(DaemonStartError, match="cannot be read"), daemon(tmp_path, tmp_path / "certs"):
        pass
