"""What a node tells each of its ranks about LoRA adapters, beside their steps."""

from __future__ import annotations

from msgspec import Struct, msgpack

LOADED = b"\x01"
_MARK = b"\xc1"  # no msgpack begins so: other calls to a rank's extension are msgpack


class LoadAdapter(Struct, frozen=True, tag=True):
    """Begins to load it. Answered with LOADED once it can be used, until then with nothing: calls
    are served in turn, and those about KV do not wait for files."""

    digest: str
    path: str  # of its folder, on every host


class DropAdapter(Struct, frozen=True, tag=True):
    """No sequence has it any more."""

    digest: str


AdapterCall = LoadAdapter | DropAdapter

_calls = msgpack.Decoder(AdapterCall)


def encode_call(call: AdapterCall) -> bytes:
    return _MARK + msgpack.encode(call)


def decode_call(message: bytes) -> AdapterCall | None:
    """None: it is another extension's."""
    if not message.startswith(_MARK):
        return None
    call: AdapterCall = _calls.decode(message[1:])
    return call
