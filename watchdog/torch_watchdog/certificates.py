"""A certificate authority of the site's own and certificates of daemons, as PEM files.

Owns their form: P-256, names or addresses of the daemon, for servers only. Keys are for this user only.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from torch_watchdog.errors import ConfigError, OutputError

__all__ = ["make_certificates"]

_AUTHORITY_DAYS = 3650
LONGEST_COMMON_NAME = 64  # callers look at the alternative names
_FETCH = "bring the authority's own key back to there first (and away again afterwards), or pass another --out for a new authority"
_BACKDATED = timedelta(hours=1)  # clocks of nodes differ


def make_certificates(folder: Path, hosts: Sequence[str], *, days: int) -> tuple[Path, ...]:
    """Returns what was written. An authority that is there signs; nothing else is replaced but the daemon's pair. Raises OutputError, ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_kept_key(folder)
        made = [] if (folder / "ca.key").exists() else _make_authority(folder)
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        signer = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise OutputError(
            folder, f"the authority cannot be made or read ({error})", "Pass another --out, or remove ca.key and ca.crt"
        ) from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise OutputError(folder / "ca.key", "this is no key of ours", "Pass another --out, or sign with your own tools")
    if signer.public_key() != authority.public_key():
        raise ConfigError(str(folder / "ca.key"), f"is not the key of {folder / 'ca.crt'}: {_FETCH}")
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([_general(host) for host in hosts])
    built = (
        _builder(hosts[0], key.public_key(), authority.subject, days)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    return (*made, *_write(folder, "daemon", key, built.sign(signer, SHA256())))


def _check_kept_key(folder: Path) -> None:
    """Another authority in place of the one that callers know would cut every one of them off."""
    if (folder / "ca.crt").exists() and not (folder / "ca.key").exists():
        raise ConfigError(str(folder / "ca.crt"), f"is there, but {folder / 'ca.key'}, which signs for it, is not: {_FETCH}")


def _make_authority(folder: Path) -> list[Path]:
    key, name = ec.generate_private_key(ec.SECP256R1()), _named("torch-watchdog authority")
    built = (
        _builder("torch-watchdog authority", key.public_key(), name, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_only(), critical=True)
    )
    return _write(folder, "ca", key, built.sign(key, SHA256()))


def _signs_only() -> x509.KeyUsage:
    never = dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    return x509.KeyUsage(**never, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False)


def _builder(subject: str, key: ec.EllipticCurvePublicKey, issuer: x509.Name, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(issuer, _named(subject), key, x509.random_serial_number(), now - _BACKDATED, now + timedelta(days=days))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:LONGEST_COMMON_NAME])])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> list[Path]:
    key_file, certificate_file = folder / f"{name}.key", folder / f"{name}.crt"
    key_file.unlink(missing_ok=True)
    with open(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    certificate_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    return [key_file, certificate_file]
