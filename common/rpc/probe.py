"""What answers at an address, when a call did not: to say in words that one side speaks TLS and
the other does not, of which gRPC says that a socket closed."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

_WAIT_S = 1.0  # for each step
_MEND = "give all roles --tls-cert, --tls-key and --tls-ca, or none"
_SETTINGS = 4  # the type of the frame an HTTP/2 server begins with (RFC 9113, 3.4)


async def tls_mismatch(address: str, over_tls: bool) -> str:
    """That the server at `address` speaks TLS and we do not, or the reverse, and the mend; empty:
    neither could be seen."""
    with suppress(OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
        if over_tls and await _speaks_http2(address):
            return f"it speaks no TLS and this role does: {_MEND}"
        if not over_tls and await _speaks_tls(address):
            return f"it speaks TLS and this role does not: {_MEND}"
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
    """Whether a first message of TLS is answered in kind; no secret is shown, none is checked."""
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
