"""Escapes and shortens untrusted text for log lines, terminals and clients."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_PEER_TEXT = 2000  # characters of a peer's message that a client gets
MAX_NAME = 200  # characters of a name
MAX_LISTED = 5  # names of tensors that an error lists
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def printable(text: str, limit: int | None = None) -> str:
    """Returns `text` as one line, with control characters, terminal escapes and bidirectional marks
    escaped in Python's notation (`\\n`, `\\x1b`, `\\u202e`)."""
    text = text if limit is None else cut(text, limit)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def cut(text: str, limit: int) -> str:
    """Returns the first `limit` characters, and how many were cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit} more characters)"


def some_of(names: Sequence[str]) -> str:
    """Returns the first of the names, and how many more there are."""
    more = len(names) - MAX_LISTED
    return ", ".join(printable(name, MAX_NAME) for name in names[:MAX_LISTED]) + (
        f" and {more} more" if more > 0 else ""
    )


def cut_bytes(text: str, limit: int) -> str:
    """Returns `text` cut to `limit` bytes of UTF-8, with unpaired surrogates escaped."""
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode(errors="ignore") + "…"


def json_printable(text: str) -> str:
    """Escapes JSON text like `printable`, in JSON's notation, without changing its meaning."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _json_escaped(c) for c in text)


def peer_code(text: str) -> str:
    """Returns a peer's error code if it has the form of one, else PEER_ERROR."""
    return text if _CODE.fullmatch(text) else "PEER_ERROR"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_escaped(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
