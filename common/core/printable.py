"""Text of others, made fit for a log line, a terminal or a client."""

from __future__ import annotations

import re

MAX_PEER_TEXT = 2000  # characters of what a peer says that go on to a client
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def printable(text: str, limit: int | None = None) -> str:
    """One line without control characters, escapes of terminals, marks that turn the direction of
    writing and the like: each as Python would write it (`\\n`, `\\x1b`, `\\u202e`)."""
    text = text if limit is None else cut(text, limit)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, and how many there were more."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit} more characters)"


def cut_bytes(text: str, limit: int) -> str:
    """What of it fits into so many bytes of UTF-8, as text that UTF-8 can hold."""
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode(errors="ignore") + "…"


def json_printable(text: str) -> str:
    """JSON of the same meaning, as `printable`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _json_escaped(c) for c in text)


def peer_code(text: str) -> str:
    """An error's code as a peer gave it, if it looks like one."""
    return text if _CODE.fullmatch(text) else "PEER_ERROR"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_escaped(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
