"""Mutual TLS between roles: a certificate per role, and one CA for all.

A certificate names the roles that may use it as URIs in its alternative names, such as
`pdserve://role/prefill`. A certificate without a role is a client's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.common.config.shared import TLSConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.rpc.renewal import RenewedFiles

ROLE_URI = "pdserve://role/"


@dataclass(frozen=True, slots=True)
class TLS:
    """PEM files that were readable, matching and valid when this object was made."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def load(cls, config: TLSConfig) -> TLS | None:
        """Checks the files; returns None if the options name none.

        Raises:
            ConfigError: a file cannot be read, the key does not match the certificate, or a peer
                with the same CA would reject the certificate.
        """
        if not (config.tls_cert and config.tls_key and config.tls_ca):
            return None
        tls = cls(Path(config.tls_cert), Path(config.tls_key), Path(config.tls_ca))
        tls.roles()
        return tls

    def renewals(self) -> RenewedFiles:
        """Detects renewed files; their certificate must name at least the same roles."""
        roles = self.roles()

        def check() -> None:
            if missing := roles - self.roles():
                raise ConfigError(
                    f"--tls-cert {self.cert} no longer names the role {', '.join(sorted(missing))}"
                )

        return RenewedFiles((self.cert, self.key, self.ca), check)

    def server_context(self) -> ssl.SSLContext:
        """Returns a context that accepts peers with a certificate of the CA."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # Sessions are not resumed, and tickets would make an idle connection look readable.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns a context with our certificate, for servers whose certificate is signed by the CA
        and names their host."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        load_cert_chain(context, self.cert, self.key, "--tls-cert", "--tls-key")
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"--tls-ca {self.ca}: {_reason(error)}") from error
        return context

    def roles(self) -> frozenset[str]:
        """Returns the roles that the certificate names. Does a handshake with itself, as two roles
        with these files will; raises ConfigError like `load`."""
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        dialling = self.client_context()
        dialling.check_hostname = False  # the host name that peers use is not known here
        client = dialling.wrap_bio(down, up)
        server = self.server_context().wrap_bio(up, down, server_side=True)
        try:
            for end in (client, server, client, server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            raise ConfigError(
                f"peers with --tls-ca {self.ca} would reject --tls-cert {self.cert} "
                f"({_reason(error)}): use a valid certificate that this CA signed for server and "
                "client use, such as `pdserve certs` makes"
            ) from error
        names: Any = (server.getpeercert() or {}).get("subjectAltName", ())
        return _roles(name for kind, name in names if kind == "URI")


def certified_roles(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """Returns the roles that the peer's certificate of a gRPC call names."""
    names = auth_context.get("x509_subject_alternative_name", ())
    return _roles(name.decode(errors="replace") for name in names)


def _roles(names: Iterable[str]) -> frozenset[str]:
    return frozenset(n.removeprefix(ROLE_URI) for n in names if n.startswith(ROLE_URI))


def load_cert_chain(
    context: ssl.SSLContext, cert: Path, key: Path | None, cert_flag: str, key_flag: str
) -> None:
    """Calls `context.load_cert_chain`, with errors that name the file.

    Raises:
        ConfigError: a file cannot be read, is not PEM, or the two do not match.
    """
    for flag, path in ((cert_flag, cert), (key_flag, key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {_reason(error)}") from error
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{cert_flag} {cert} and {key_flag} {key or cert} are not a certificate and its "
            f"unencrypted key in PEM: {_reason(error)}"
        ) from error


def _reason(error: OSError) -> str:
    return (getattr(error, "verify_message", "") or error.strerror or str(error)).strip()


# ---- only one side uses TLS ----

_WAIT_S = 1.0  # for each step
_FIX = "give all roles --tls-cert, --tls-key and --tls-ca, or none"
_SETTINGS = 4  # type of the first frame of an HTTP/2 server (RFC 9113, 3.4)


async def tls_mismatch(address: str, over_tls: bool) -> str:
    """Returns an explanation, with the fix, if only one of this process and the server at `address`
    uses TLS; "" if that was not detected."""
    with suppress(OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
        if over_tls and await _speaks_http2(address):
            return f"it does not use TLS, but this role does: {_FIX}"
        if not over_tls and await _speaks_tls(address):
            return f"it uses TLS, but this role does not: {_FIX}"
    return ""


async def _speaks_http2(address: str) -> bool:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_WAIT_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            header = await reader.readexactly(9)
        finally:
            writer.close()
    return header[3] == _SETTINGS


async def _speaks_tls(address: str) -> bool:
    """Returns whether the server answers a TLS ClientHello with TLS. Sends no secret."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    async with asyncio.timeout(_WAIT_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            writer.write(outgoing.read())
            record = await reader.readexactly(3)
        finally:
            writer.close()
    return record[0] in (21, 22) and record[1] == 3  # an alert or a handshake, of TLS
