"""Finds out how a chat template takes messages, by rendering short conversations with it.

Templates differ: some print a list of parts as Python would, some ignore or refuse a system message
behind others. The rendered text shows that without any knowledge of the template's language.
"""

from __future__ import annotations

from functools import lru_cache

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.text.tokenizer import Tokenizer

_TEMPLATES = 32  # of which answers are kept
_SAID = tuple(f"probe-{word}" for word in ("amber", "birch", "cedar", "dune", "ember", "fjord"))
_PROBES = {
    "texts": ("user",),
    "user parts": ("user",),
    "system parts": ("system", "user"),
    "assistant parts": ("user", "assistant", "user"),
    "late systems": ("system", "system", "user", "assistant", "system", "user"),
}
"""The roles of the messages."""


def takes_parts(tokenizer: Tokenizer, template: str | None, role: str) -> bool:
    """Returns whether content may be a list of parts in messages of this role. `template`: a
    client's own; None: the model's."""
    return _takes(tokenizer, template, tokenizer.chat_template, f"{role} parts")


def takes_texts(tokenizer: Tokenizer, template: str | None) -> bool:
    """Returns whether content may be a string."""
    return _takes(tokenizer, template, tokenizer.chat_template, "texts")


def takes_late_systems(tokenizer: Tokenizer, template: str | None) -> bool:
    """Returns whether system messages may follow others."""
    return _takes(tokenizer, template, tokenizer.chat_template, "late systems")


def try_probes(tokenizer: Tokenizer) -> None:
    """Renders all of them with the model's template, whatever comes of it."""
    for what in _PROBES:
        _takes(tokenizer, None, tokenizer.chat_template, what)


@lru_cache(maxsize=_TEMPLATES)
def _takes(tokenizer: Tokenizer, template: str | None, _: str, what: str) -> bool:
    """The third argument is the model's template, on which the answer depends, too."""
    roles = _PROBES.get(what, ())
    in_parts = what.removesuffix(" parts")
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if role == in_parts else text}
        for role, text in zip(roles, _SAID, strict=False)
    ]
    try:
        text = tokenizer.render_chat_template(messages, chat_template=template)
    except InvalidRequest:
        return False
    said = _SAID[: len(roles)]
    printed = in_parts != what and any(f"'{each}" in text or f'"{each}' in text for each in said)
    return bool(said) and not printed and all(each in text for each in said)
