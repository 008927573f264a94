"""Calls from a node to its ranks that load and drop LoRA adapters."""

from __future__ import annotations

from msgspec import Struct, msgpack

LOADED = b"\x01"
_MARK = b"\xc1"  # invalid in msgpack, which is the format of a rank's other calls


class LoadAdapter(Struct, frozen=True, tag=True):
    """Starts to load an adapter. The answer is LOADED once it can be used, empty before: calls are
    served one by one, and calls about KV must not wait for file reads."""

    digest: str
    path: str  # folder, the same on every host


class DropAdapter(Struct, frozen=True, tag=True):
    """Drops an adapter that no sequence uses."""

    digest: str


AdapterCall = LoadAdapter | DropAdapter

_calls = msgpack.Decoder(AdapterCall)


def encode_call(call: AdapterCall) -> bytes:
    return _MARK + msgpack.encode(call)


def decode_call(message: bytes) -> AdapterCall | None:
    """Returns the call, or None if the message is for another extension."""
    if not message.startswith(_MARK):
        return None
    call: AdapterCall = _calls.decode(message[1:])
    return call
