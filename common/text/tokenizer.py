"""Text ⇄ token ids for one model, and its chat template.

Always `PreTrainedTokenizerFast` over the checkpoint's own `tokenizer.json`: transformers'
AutoTokenizer rebuilds some families from their vocabulary and ignores that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast

from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.core.printable import cut
from pdserve.common.text.tokenizer_file import (
    byte_level_alphabet,
    byte_tokenizer,
    has_tokenizer,
    no_tokenizer,
)

_RESERVED = frozenset(signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
_MAX_TEXTS = 2**16
_MAX_ERROR = 500  # characters of what a template says went wrong
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Read-only after construction, so threads may share it."""

    def __init__(
        self, hf: PreTrainedTokenizerFast, eos_token_ids: Sequence[int] | None = None
    ) -> None:
        self._hf = hf
        self._backend = hf.backend_tokenizer
        # Left on, these would be switched off by the first call: a write that threads race for.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = hf.split_special_tokens
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._texts: dict[int, str] = {}  # of single tokens, as they were needed
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._alphabet = _decoder_alphabet(repr(self._backend.decoder))
        self.vocab_size: int = self._backend.get_vocab_size()
        # Of the vocabulary's longest entry, which has at least one character for each of its text.
        self.max_token_chars = max(map(len, self._backend.get_vocab()))
        own_eos = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_token_ids = tuple(own_eos if eos_token_ids is None else eos_token_ids)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face checkpoint.

        Raises:
            ConfigError: `tokenizer.json` is missing or cannot be read.
        """
        folder = Path(folder)
        if not has_tokenizer(folder):
            raise no_tokenizer(folder)
        try:
            hf = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the reader's own errors have no common class
            raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error
        return cls(hf, _eos_from_config(folder))

    @classmethod
    def of_bytes(cls, vocab_size: int, eos_token_ids: Sequence[int]) -> Tokenizer:
        """`byte_tokenizer`'s. Raises ConfigError: the vocabulary has no room for all bytes."""
        backend = byte_tokenizer(vocab_size)
        hf = PreTrainedTokenizerFast(tokenizer_object=backend)
        hf.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        return cls(hf, eos_token_ids)

    def use_chat_template(self, template: str) -> None:
        """This one instead of the checkpoint's; to be called before threads share this.

        Raises:
            ConfigError: it is no template.
        """
        self._hf.chat_template = template
        try:
            self.render_chat_template([{"role": "user", "content": "a"}])
        except InvalidRequest as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ConfigError(f"--chat-template: {error.__cause__}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids; `add_special_tokens` runs the post-processor, which gives a BOS where the
        model wants one."""
        # As a batch: that leaves other threads the interpreter meanwhile.
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoded.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD. Ids past the vocabulary
        (rows that only pad an embedding) are empty."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_alone(self, token_id: int) -> str:
        """`decode([token_id], skip_special_tokens=False)`, remembered: few tokens are most of a
        text."""
        text = self._texts.get(token_id)
        if text is None:
            if len(self._texts) >= _MAX_TEXTS:
                self._texts.clear()
            text = self._texts[token_id] = self.decode((token_id,), skip_special_tokens=False)
        return text

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        return str(self._backend.to_str())

    def marker(self, text: str) -> int | None:
        """The token beside the vocabulary proper that is this text, special or not; None: there is
        none, and the text is written by others."""
        return next((i for i, each in self._added.items() if each == text), None)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes one token stands for inside a text, special or not."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) or ""
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return b"".join(self._alphabet.get(char) or char.encode() for char in token)

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no UTF-8 alone become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, as `render_chat_template` words it."""
        return self.encode(self.render_chat_template(messages, **options), add_special_tokens)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[Any, Any] | Callable[..., Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Templates run in transformers' Jinja sandbox.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.
        """
        if chat_template is None and not self._hf.chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        if clash := _RESERVED.intersection(template_kwargs or ()):
            raise InvalidRequest(
                f"{sorted(clash)[0]!r} is not a template variable", param="chat_template_kwargs"
            )
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(template_kwargs or {}),
            )
            str(text).encode()
        except MemoryError:
            raise
        except Exception as error:  # whatever code does that meets what it was not written for
            param = "messages" if chat_template is None else "chat_template"
            said = cut(str(error), _MAX_ERROR)
            raise InvalidRequest(f"the chat template failed: {said}", param=param) from error
        return str(text)


def _eos_from_config(folder: Path) -> tuple[int, ...] | None:
    """`eos_token_id` of generation_config.json, else of config.json; None when neither says."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return None


def _decoder_alphabet(decoder: str) -> dict[str, bytes]:
    """Which characters of a vocabulary entry stand for other bytes, from the decoder's repr."""
    if "ByteLevel" in decoder:
        return byte_level_alphabet()
    return {"▁": b" "} if "▁" in decoder else {}
