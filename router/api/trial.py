"""Tries a model's tokenizer and chat template before this process uses them: in children with
bounds, on texts that expose loops, growth and panics. A checkpoint may be hostile.

    this process ── fork ──▶ loads the tokenizer ── fork ──▶ encodes and decodes texts
                                                 ── fork ──▶ renders short conversations
                                                 ── fork ──▶ renders conversations of ordinary size
                 ◀── a Verdict, or why the model cannot be served ──
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import process_time
from typing import Any

import msgspec

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.apart import Bounds, run_apart, try_files
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.conversation import BOUNDS, MAX_PARTS
from pdserve.router.api.template_probes import try_probes
from pdserve.router.api.template_syntax import is_plain
from pdserve.router.cluster.served_model import ServedModel, check_template, load_served_model

logger = logging.getLogger(__name__)

# The largest honest tokenizers take a few seconds to load, conversions longer.
LOADING = Bounds(cpu_seconds=120.0, memory=2 * 2**30, wall_seconds=300)
# Honest ones take half a second.
TEXTS = Bounds(cpu_seconds=4.0, memory=512 * 2**20, wall_seconds=120)
_CHEAPNESS = Bounds(cpu_seconds=1.0, memory=512 * 2**20)
CHEAP = 0.1  # seconds of CPU for a conversation of ordinary size
MAX_PATTERNS = 256  # strings in a tokenizer's normalizer, pre-tokenizer and decoder
_LONG, _MANY, _FEW = 2**16, 2**12, 2**6  # times that a piece of text is repeated
_IDS = 2**12  # token ids to decode at once
_MAX_GROWTH, _MAX_ADDED = 64, 2**12  # tokens of a character, and of any text
_ODD = (
    "\0",
    "\u0301",
    "a\u0301",
    "\ufdfa",
    "\U0010ffff",
    "👍🏽",
    "東京",
    " ",
    "\n",
    "\t ",
    "1",
    "'s",
    "<",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    warning: str = ""  # why the chat template fails for a plain message
    cheap: bool = False  # whether the event loop may render conversations of ordinary size


_verdicts = msgspec.msgpack.Decoder(Verdict)


def load_tried(config: ModelConfig) -> tuple[ServedModel, bool]:
    """Returns the model, and `Verdict.cheap`. Only one thread of this process may hold locks.

    Raises:
        ConfigError: its tokenizer or template cannot be read, panics, or takes too much.
        Unavailable: the host is too busy.
    """
    what = f"reading the tokenizer of {config.tokenizer or config.model}"
    verdict = _verdicts.decode(try_files(what, lambda: _try(config), LOADING))
    if verdict.warning:
        logger.warning("%s", verdict.warning)
    model = load_served_model(config)
    if model.tokenizer.chat_template and not verdict.cheap:
        logger.info("the chat template may be costly: a child process renders each conversation")
    return model, verdict.cheap


def _try(config: ModelConfig) -> bytes:
    """Runs in a child, whose children have tighter bounds."""
    tokenizer = load_served_model(config).tokenizer
    what = f"the tokenizer of {config.tokenizer or config.model}"
    try_files(
        f"{what} (--tokenizer replaces it), tried on short texts,", lambda: _texts(tokenizer), TEXTS
    )
    own = config.chat_template is None
    what = (
        "the checkpoint's chat template (--chat-template replaces it)" if own else "--chat-template"
    )
    warning = try_files(
        f"{what}, tried on a few messages,", lambda: _short(tokenizer, config), BOUNDS
    )
    cheap = run_apart(lambda: b"+" * _is_cheap(tokenizer), _CHEAPNESS).result == b"+"
    return msgspec.msgpack.encode(Verdict(warning.decode(), cheap))


# ---- texts -----------------------------------------------------------------------------------


def _texts(tokenizer: Tokenizer) -> bytes:
    """Raises ConfigError: a text becomes too many tokens, or there are too many patterns."""
    for text in _probes(tokenizer):
        ids = tokenizer.encode(text)
        if len(ids) > _MAX_ADDED + _MAX_GROWTH * len(text):
            raise ConfigError(f"the tokenizer makes {len(ids)} tokens of {len(text)} characters")
        tokenizer.decode(ids, skip_special_tokens=False)
    for start in range(0, tokenizer.vocab_size, _IDS):
        tokenizer.decode(range(start, start + _IDS), skip_special_tokens=False)
    return b""


def _probes(tokenizer: Tokenizer) -> Iterator[str]:
    yield from ("", "a", "aa", "a" * _LONG + "!")
    for text in _ODD:
        yield text * (_MANY // len(text)) + "!"
    patterns = list(dict.fromkeys(_strings(tokenizer.steps())))
    if len(patterns) > MAX_PATTERNS:
        raise ConfigError(f"the tokenizer has more than {MAX_PATTERNS} patterns")
    for pattern in patterns:  # a text that it replaces, or letters that it matches
        yield pattern[:_MANY] * _FEW
    for char in sorted(set("".join(patterns))):
        yield char * _MANY + "!"


def _strings(step: Any) -> Iterator[str]:
    """Yields the patterns in the description of a step. `content` is what replaces them."""
    if isinstance(step, dict):
        for kind, value in step.items():
            if kind in ("String", "Regex") and isinstance(value, str):
                yield value
            else:
                yield from _strings(value)
    elif isinstance(step, list):
        for each in step:
            yield from _strings(each)


# ---- conversations ---------------------------------------------------------------------------


def _short(tokenizer: Tokenizer, config: ModelConfig) -> bytes:
    """Returns the warning. Raises ConfigError for a syntax error."""
    warning = check_template(tokenizer, config)
    try_probes(tokenizer)
    return warning.encode(errors="backslashreplace")


def _is_cheap(tokenizer: Tokenizer) -> bool:
    if not is_plain(tokenizer.chat_template):
        return False
    for messages, tools in _conversations():
        begin = process_time()
        with suppress(InvalidRequest):  # it may want other roles
            tokenizer.render_chat_template(messages, tools=tools)
        if process_time() - begin > CHEAP:
            return False
    return True


def _conversations() -> Iterator[tuple[list[dict[str, Any]], list[Any] | None]]:
    user, assistant = ({"role": role, "content": "a b"} for role in ("user", "assistant"))
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {"a": [1, {}]}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "a", "content": "<think>a</think>"}
    parameters = {"type": "object", "properties": json.loads('{"a": {"type": "string"}}')}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "a", "parameters": parameters},
    }
    yield [user], None  # compiles it
    yield [user, assistant] * (MAX_PARTS // 2), None
    yield [user, calling, answer, assistant] * (MAX_PARTS // 4), [tool] * _FEW
    yield [user | {"content": "<think> a\n" * (_LONG // 10)}], None
    yield [user, assistant | {"content": "</think> a\n" * (_LONG // 11)}, user], None
