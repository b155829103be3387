"""Encrypted lines between machines, from the one secret that both ends share: the token.

Owns how a token becomes a certificate authority: both ends derive the same private key from it, and each issues itself a certificate of its own. So
who can show a certificate knows the token, whichever end it is, and nothing has to be handed around but the token. A port of this machine or a unix
socket does without. Knows gRPC and `cryptography`, and nothing of jobs.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import grpc

from torch_watchdog_proto.address import is_loopback, split

__all__ = ["MIN_TOKEN_CHARACTERS", "is_strong", "leaves_the_machine", "new_channel", "server_credentials"]

MIN_TOKEN_CHARACTERS = 32  # whoever reaches the port may try tokens against its certificate, at leisure and elsewhere

_NAME = "torch-watchdog"  # of both ends, in their certificates: what they prove is the token, not a host's name
_ORDER_OF_P256 = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_ALWAYS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # clocks of nodes differ; the token is what ends


def leaves_the_machine(address: str) -> bool:
    host, port = split(address)
    return bool(port) and not is_loopback(host)


def is_strong(token: str) -> bool:
    """Whether the token may protect a port that others can reach."""
    return len(token) >= MIN_TOKEN_CHARACTERS


def new_channel(grpc_kind: Any, address: str, token: str, options: Sequence[tuple[str, Any]], authority: bytes | None = None) -> Any:
    """A channel of `grpc_kind` (grpc or grpc.aio) to the daemon at `address`. `authority`: the PEM of who signed its certificate, where it has one."""
    if not leaves_the_machine(address):
        return grpc_kind.insecure_channel(address, options=options)
    if authority is not None:
        return grpc_kind.secure_channel(address, grpc.ssl_channel_credentials(authority), options=options)
    authority, key, certificate = _identity(token)
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc_kind.secure_channel(address, credentials, options=[*options, ("grpc.ssl_target_name_override", _NAME)])


def server_credentials(token: str) -> Any:
    """For a port that leaves the machine: only callers that know the token get as far as a call."""
    authority, key, certificate = _identity(token)
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)


def _identity(token: str) -> tuple[bytes, bytes, bytes]:
    """The authority's certificate, and a fresh key with a certificate of that authority; all PEM."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    authority_key = ec.derive_private_key(_derived(token) % (_ORDER_OF_P256 - 1) + 1, ec.SECP256R1())
    own_key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(f"{_NAME} token", authority_key.public_key(), authority_key, is_authority=True)
    own = _certificate(_NAME, own_key.public_key(), authority_key, is_authority=False)
    return authority, own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), own


def _derived(token: str) -> int:
    """HKDF with SHA-512, one block: 512 bits for a number below 2**256, so that it is spread evenly."""
    secret = hmac.digest(b"torch-watchdog tls 1", token.encode(), hashlib.sha512)
    return int.from_bytes(hmac.digest(secret, b"authority key\x01", hashlib.sha512))


def _certificate(subject: str, public_key: Any, signer: Any, *, is_authority: bool) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    builder = (
        x509.CertificateBuilder(named(f"{_NAME} token"), named(subject), public_key, x509.random_serial_number(), *_ALWAYS)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
    )
    return builder.sign(signer, SHA256()).public_bytes(Encoding.PEM)
