"""`pdserve certs`: makes a trial CA and one certificate that every role of a cluster may use, or
one for each role.

A certificate has a `pdserve://role/…` URI for each role that may use it; a client's (`--client`)
has none.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import ConfigError

PrivateKey = ec.EllipticCurvePrivateKey

ROLE_URI = "pdserve://role/"  # common/rpc/tls.py reads it
ROLES = ("router", "prefill", "decode", "both")
HOSTS = ("localhost", "127.0.0.1", "::1")
CA_NAME = "pdserve trial CA"
VALID = timedelta(days=365)
SKEW = timedelta(minutes=5)  # clock skew between hosts that a new certificate tolerates


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="pdserve certs",
        description="Make a trial CA and one certificate, for servers and clients, that every "
        "role of a cluster may use, or one for each. Without --keep-ca the CA's key is not "
        "written: to add a host, or to renew, make new files.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write to")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or address that peers and clients connect to, in addition to "
        f"{', '.join(HOSTS)}; *.NAME: all hosts of a domain; may be given several times",
    )
    parser.add_argument(
        "--by-role",
        action="store_true",
        help=f"make a pair for each role, ROLE-cert.pem and ROLE-key.pem ({', '.join(ROLES)}), "
        "instead of one for all: a host that loses its key has lost one role",
    )
    parser.add_argument(
        "--client",
        action="store_true",
        help="also make client-cert.pem and client-key.pem for clients of the gRPC API; this "
        "certificate cannot act as a role",
    )
    parser.add_argument(
        "--keep-ca", action="store_true", help="keep the CA's key, in ca-key.pem, for --renew"
    )
    parser.add_argument(
        "--renew",
        action="store_true",
        help="replace cert.pem and key.pem (with --by-role each role's) by new ones from the CA in "
        "DIR; processes that use them notice",
    )
    options = parser.parse_args(argv)
    hosts = (*HOSTS, *options.host)
    if options.renew:
        if options.client or options.keep_ca:
            raise ConfigError("--renew excludes --client and --keep-ca")
        renew(options.folder, hosts, by_role=options.by_role)
        return 0
    for flags in write(
        *(options.folder, hosts),
        client=options.client,
        keep_ca=options.keep_ca,
        by_role=options.by_role,
    ):
        print(shlex.join(flags))
    return 0


def renew(folder: Path, hosts: Iterable[str], *, by_role: bool = False) -> None:
    """Replaces `cert.pem` and `key.pem`, or each role's, by new ones from the CA in the folder;
    each file is replaced atomically.

    Raises:
        ConfigError: the folder has no CA with its key, or cannot be written to.
    """
    try:
        ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        ca_key = load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--renew needs {folder / 'ca.pem'} and ca-key.pem, as --keep-ca writes them: {error}"
        ) from error
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / 'ca-key.pem'} is no key of `pdserve certs --keep-ca`")
    try:
        for name, content in _pairs(hosts, ca, ca_key, by_role).items():
            new = folder / f".{name}.pem.new"
            new.unlink(missing_ok=True)
            _create(new, *content)
            new.replace(folder / f"{name}.pem")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def write(
    folder: Path,
    hosts: Iterable[str],
    *,
    client: bool = False,
    keep_ca: bool = False,
    by_role: bool = False,
) -> list[list[str]]:
    """Writes `ca.pem`, `cert.pem` and `key.pem` (mode 0600), valid for a year, `by_role` a pair for
    each role instead, with `client` also a client's pair, and with `keep_ca` the CA's key. A
    `.gitignore` beside them keeps keys out of commits. Returns the --tls-… flags that name the
    files of a pair, for each.

    Raises:
        ConfigError: a host is neither a name nor an address, or a file cannot be written. Existing
            files are never overwritten.
    """
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _ca(ca_key)
    files = _pairs(hosts, ca, ca_key, by_role)
    files["ca"] = (ca.public_bytes(Encoding.PEM), 0o644)
    if keep_ca:
        files["ca-key"] = (_pem(ca_key), 0o600)
    if client:
        files |= _pair("client-", [x509.DNSName("client")], ca, ca_key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            _create(folder / ".gitignore", b"*.pem\n", 0o644)
        for name, (data, mode) in files.items():
            _create(folder / f"{name}.pem", data, mode)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; name another folder") from error
    return [
        [
            f"--tls-cert={folder / f'{prefix}cert.pem'}",
            f"--tls-key={folder / f'{prefix}key.pem'}",
            f"--tls-ca={folder / 'ca.pem'}",
        ]
        for prefix in _roles_of_pairs(by_role)
    ]


def _create(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(data)


def _roles_of_pairs(by_role: bool) -> dict[str, tuple[str, ...]]:
    """Returns prefix of files → the roles that the certificate names."""
    return {f"{role}-": (role,) for role in ROLES} if by_role else {"": ROLES}


def _pairs(
    hosts: Iterable[str], ca: x509.Certificate, ca_key: PrivateKey, by_role: bool
) -> dict[str, tuple[bytes, int]]:
    """Returns file name → (content, mode) of the roles' certificates and keys."""
    files: dict[str, tuple[bytes, int]] = {}
    places = [*map(_name, dict.fromkeys(hosts))]
    for prefix, roles in _roles_of_pairs(by_role).items():
        named = [x509.UniformResourceIdentifier(ROLE_URI + role) for role in roles]
        files |= _pair(prefix, [*places, *named], ca, ca_key)
    return files


def _pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _pair(
    prefix: str, names: Sequence[x509.GeneralName], ca: x509.Certificate, ca_key: PrivateKey
) -> dict[str, tuple[bytes, int]]:
    """Returns file name → (content, mode) of a new certificate with these names and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    cert = _certificate(key, names, ca, ca_key)
    return {
        f"{prefix}cert": (cert.public_bytes(Encoding.PEM), 0o644),
        f"{prefix}key": (_pem(key), 0o600),
    }


def _ca(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    return (
        _builder(key, CA_NAME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    key: PrivateKey,
    alternatives: Sequence[x509.GeneralName],
    ca: x509.Certificate,
    ca_key: PrivateKey,
) -> x509.Certificate:
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    names = x509.SubjectAlternativeName(alternatives)
    return (
        _builder(key, "pdserve")
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(names, critical=False)
        .add_extension(authority, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(key: ec.EllipticCurvePrivateKey, subject: str) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CA_NAME)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(**wanted: bool) -> x509.KeyUsage:
    usages = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**(dict.fromkeys(usages, False) | wanted))


def _name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not re.fullmatch(r"(\*\.)?[\w-]+(\.[\w-]+)*", host, re.ASCII):
        raise ConfigError(f"--host {host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)
