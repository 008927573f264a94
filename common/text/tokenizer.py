"""The tokenizer and chat template of a model.

Always uses `PreTrainedTokenizerFast`, with the checkpoint's `tokenizer.json` if there is one:
transformers' AutoTokenizer rebuilds some families from their vocabulary and ignores that file.
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

from pdserve.common.core.checkpoint_config import read_json
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.core.printable import cut
from pdserve.common.text.tokenizer_file import byte_level_alphabet, byte_tokenizer
from pdserve.common.text.tokenizer_formats import TokenizerSource, convert, find_source

_RESERVED = frozenset(signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
_MAX_TEXTS = 2**16
_MAX_ERROR = 500  # characters of a template's error
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A tokenizer. Read-only after construction, so threads can share it."""

    def __init__(
        self, hf: PreTrainedTokenizerFast, eos_token_ids: Sequence[int] | None = None
    ) -> None:
        self._hf = hf
        self._backend = hf.backend_tokenizer
        # Turned off here, because the first call would do it, which is a data race of threads.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = hf.split_special_tokens
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._texts: dict[int, str] = {}  # cache of `text_alone`
        self.special = frozenset(i for i, token in added.items() if token.special)
        decoder = repr(self._backend.decoder)
        self._alphabet = _decoder_alphabet(decoder)
        # A text is the bytes of its tokens: tokens of whole characters have the same text alone.
        self.joins_bytes = decoder.startswith("ByteLevel(")
        self.vocab_size: int = self._backend.get_vocab_size()
        # Length of the longest entry, an upper bound for the characters of a token's text.
        self.max_token_chars = max(map(len, self._backend.get_vocab()))
        own_eos = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_token_ids = tuple(own_eos if eos_token_ids is None else eos_token_ids)

    @classmethod
    def from_folder(cls, folder: str | Path, mode: str = "auto") -> Tokenizer:
        """Loads the tokenizer of a Hugging Face checkpoint. `mode` is that of --tokenizer-mode.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        folder = Path(folder)
        source = find_source(folder, mode)
        try:
            if source is TokenizerSource.JSON:
                hf = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            else:
                hf = convert(folder, source)
        except ConfigError:
            raise
        except Exception as error:  # the reader's own errors have no common class
            raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error
        if not _is_template(hf.chat_template):
            raise ConfigError(
                f"cannot read the tokenizer in {folder}: its chat_template is no text"
            )
        return cls(hf, _eos_from_config(folder))

    @classmethod
    def of_bytes(cls, vocab_size: int, eos_token_ids: Sequence[int]) -> Tokenizer:
        """Returns a tokenizer with a token per byte. Raises ConfigError like `byte_tokenizer`."""
        backend = byte_tokenizer(vocab_size)
        hf = PreTrainedTokenizerFast(tokenizer_object=backend)
        hf.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        return cls(hf, eos_token_ids)

    @property
    def chat_template(self) -> str:
        """The source of the template; empty if there is none. Of several by name, all."""
        template = self._hf.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def use_chat_template(self, template: str) -> None:
        """Replaces the checkpoint's template; call it before threads share this object."""
        self._hf.chat_template = template

    def check_chat_template(self) -> str:
        """Renders a message with the template, or with each of several by name. Returns why the
        default one failed, which may be intended.

        Raises:
            ConfigError: a template has a syntax error.
        """
        given = self._hf.chat_template or {}
        named = given if isinstance(given, dict) else {"default": given}
        failures = {name: self._failure(template) for name, template in named.items()}
        return failures.get("default", "")

    def _failure(self, template: str) -> str:
        """Returns why a template fails for a short message, as text and in parts; "" if not."""
        failure = ""
        for content in ("a", [{"type": "text", "text": "a"}]):
            message = {"role": "user", "content": content}
            try:
                self.render_chat_template([message], chat_template=template)
            except InvalidRequest as error:
                if isinstance(wrong := error.__cause__, TemplateSyntaxError):
                    said = cut(wrong.message or "", _MAX_ERROR).rstrip(".")
                    raise ConfigError(f"line {wrong.lineno}: {said}") from error
                failure = failure or error.message
            else:
                return ""
        return failure

    def tokens_past(self, vocab_size: int) -> list[str]:
        """Returns the tokens with ids that a vocabulary of this size does not have."""
        return [each for each, number in self._backend.get_vocab().items() if number >= vocab_size]

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns token ids. `add_special_tokens`: run the post-processor, which adds a BOS token
        if the model has one."""
        # encode_batch, because it releases the GIL.
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoded.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids; invalid UTF-8 becomes U+FFFD. Ids past the vocabulary
        (padding rows of the embedding) have no text."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_alone(self, token_id: int) -> str:
        """Returns `decode([token_id], skip_special_tokens=False)`, cached: few distinct tokens make
        up most of a text."""
        text = self._texts.get(token_id)
        if text is None:
            if len(self._texts) >= _MAX_TEXTS:
                self._texts.clear()
            text = self._texts[token_id] = self.decode((token_id,), skip_special_tokens=False)
        return text

    def steps(self) -> list[Any]:
        """Returns the parts of a `tokenizer.json` that rewrite or cut texts."""
        backend = self._backend
        steps = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
        return [json.loads(step.__getstate__()) for step in steps if step is not None]

    def to_json(self) -> str:
        """Returns the content of a `tokenizer.json`."""
        return str(self._backend.to_str())

    def marker(self, text: str) -> int | None:
        """Returns the added token, special or not, with exactly this text; None if there is
        none."""
        return next((i for i, each in self._added.items() if each == text), None)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the exact bytes of one token within a text, special or not."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) or ""
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return b"".join(self._alphabet.get(char) or char.encode() for char in token)

    def token_text(self, token_id: int) -> str:
        """Returns one token as text; bytes that are not UTF-8 by themselves become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> tuple[int, ...]:
        """Returns the token ids of `render_chat_template`'s text."""
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
        """Returns the text of a conversation. Templates run in transformers' Jinja sandbox.

        Raises:
            InvalidRequest: there is no template, or it raised an error.
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
        except Exception as error:  # a template may fail in any way for unexpected messages
            param = "messages" if chat_template is None else "chat_template"
            said = cut(str(error), _MAX_ERROR)
            raise InvalidRequest(f"the chat template failed: {said}", param=param) from error
        return str(text)


def _is_template(template: Any) -> bool:
    """Returns whether it is a template, templates by name, or none."""
    parts = template.values() if isinstance(template, dict) else [template or ""]
    return all(isinstance(each, str) for each in parts)


def _eos_from_config(folder: Path) -> tuple[int, ...] | None:
    """Returns `eos_token_id` of generation_config.json, else of config.json, else None."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = read_json(path).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return None


def _decoder_alphabet(decoder: str) -> dict[str, bytes]:
    """Returns the characters of vocabulary entries that stand for other bytes."""
    if "ByteLevel" in decoder:
        return byte_level_alphabet()
    return {"▁": b" "} if "▁" in decoder else {}
