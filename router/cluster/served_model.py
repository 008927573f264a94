"""The served model, as far as the router must know it: names, window and tokenizer, no weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.checkpoint_config import read_json
from pdserve.common.core.errors import ConfigError, InvalidRequest, ModelNotFound, PdserveError
from pdserve.common.core.generic_spec import Outline, read_outline
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.parameters import MAX_LOGPROBS, MAX_TOKENS, PARAMETERS, check_token_ids
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.common.text.tokenizer_file import has_tokenizer

logger = logging.getLogger(__name__)

_PIECE = 64 * 1024  # characters
# Sampling defaults that vLLM reads from a checkpoint's generation_config.json.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Name, window and tokenizer, and the checks that need them."""

    names: tuple[str, ...]  # clients may use any of them
    root: str  # path of the checkpoint
    max_model_len: int
    vocab_size: int  # rows of the model's embedding; may exceed the tokenizer's
    created: int  # Unix time, seconds
    tokenizer: Tokenizer
    max_logprobs: int = MAX_LOGPROBS
    # Sampling parameters by name.
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    native: ModelSpec | None = field(default=None, compare=False)  # None: nodes describe it

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    def within(self, window: int | None) -> ServedModel:
        """Returns the model with a context window of at most `window` tokens; None: its own."""
        if window is None or window >= self.max_model_len:
            return self
        return replace(self, max_model_len=window)

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFound for another model's name; None means this model."""
        if name is not None and name not in self.names:
            raise ModelNotFound(
                f"The model `{name}` does not exist. This server has `{self.name}`.", param="model"
            )

    def check_ids(self, token_ids: Sequence[int], param: str) -> tuple[int, ...]:
        """Returns the ids, if all are in the vocabulary."""
        check_token_ids(token_ids, self.vocab_size, param)
        return tuple(token_ids)

    def check_prompt(self, token_ids: Sequence[int], param: str) -> tuple[int, ...]:
        """Calls `check_ids`, but first refuses a prompt that is much longer than the window."""
        if len(token_ids) > 2 * self.max_model_len:
            raise self._too_long(param, f"the {param} has {len(token_ids)} tokens")
        return self.check_ids(token_ids, param)

    def fit_max_tokens(
        self, prompt_tokens: int, requested: int | None, default: int | None, param: str
    ) -> int:
        """Returns the number of tokens to generate: what was requested, or `default` (None = no
        limit) as far as the window allows.

        Raises:
            InvalidRequest: the prompt is empty, or it and the request exceed the window.
        """
        if prompt_tokens == 0:
            raise InvalidRequest(f"{param} has no tokens", param=param)
        room = self.max_model_len - prompt_tokens
        if requested is not None:
            requested = min(requested, MAX_TOKENS)  # the message must be able to write the sum
        if room < (requested or 1):
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {prompt_tokens + (requested or 1)} tokens ({prompt_tokens} in the "
                f"{param}, {requested or 1} for the completion). Please reduce the length of the "
                f"{param} or the completion.",
                param=param,
                code="CONTEXT_LENGTH_EXCEEDED",
            )
        if requested is not None:
            return requested
        return room if default is None else min(room, default)

    def truncate(
        self, token_ids: Sequence[int], most: int | None, max_tokens: int | None
    ) -> Sequence[int]:
        """Returns the last `most` of a prompt's tokens; None takes all, -1 as many as leave room
        for `max_tokens`."""
        if most is None:
            return token_ids
        if most == -1:
            most = max(1, self.max_model_len - (max_tokens or 1))
        if not 0 < most <= self.max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1, or at least 1 and at most "
                f"{self.max_model_len}",
                param="truncate_prompt_tokens",
            )
        return token_ids[-most:]

    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text. Encoding takes about a microsecond and 250 bytes of
        memory per character, so a text that cannot fit the window is refused before.

        Raises:
            InvalidRequest: the text is too long.
        """
        if len(text) > self.max_model_len * self.tokenizer.max_token_chars:
            raise self._too_long(param, f"the {param} has {len(text)} characters")
        if len(text) > 2 * _PIECE:
            self._check_pieces(text, param)
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_pieces(self, text: str, param: str) -> None:
        """Encodes piece by piece and stops when the text cannot fit. Cuts add tokens, but do not
        double their number."""
        num_tokens = 0
        for start in range(0, len(text), _PIECE):
            num_tokens += len(self.tokenizer.encode(text[start : start + _PIECE], False))
            if num_tokens > 2 * self.max_model_len:
                raise self._too_long(param, f"the {param} has more than {num_tokens // 2} tokens")

    def _too_long(self, param: str, reason: str) -> InvalidRequest:
        return InvalidRequest(
            f"This model's maximum context length is {self.max_model_len} tokens. However, "
            f"{reason}. Please reduce the length of the {param}.",
            param=param,
            code="CONTEXT_LENGTH_EXCEEDED",
        )


def load_served_model(config: ModelConfig) -> ServedModel:
    """Loads name, window and tokenizer of the model, and no weights."""
    assert config.model is not None, "main resolves the embedded model"
    folder = Path(config.model)
    spec = read_outline(folder, config.model_impl, config.overrides)
    max_model_len = config.context(spec.max_position_embeddings)
    spec.check_max_model_len(max_model_len)
    return ServedModel(
        names=tuple(dict.fromkeys(config.served_model_name or [config.served_name])),
        root=str(folder),
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        created=int(time.time()),
        tokenizer=_load_tokenizer(config, folder, spec),
        max_logprobs=config.max_logprobs,
        defaults=_load_defaults(config, folder),
        native=spec if isinstance(spec, ModelSpec) else None,
    )


def _load_tokenizer(config: ModelConfig, folder: Path, spec: Outline | ModelSpec) -> Tokenizer:
    """Loads the checkpoint's tokenizer. Dummy weights need none: a config.json is enough for
    them."""
    missing = not has_tokenizer(folder)
    if config.load_format == "dummy" and config.tokenizer is None and missing:
        logger.warning("%s has no tokenizer: every byte of a text is a token", folder)
        return Tokenizer.of_bytes(spec.vocab_size, spec.eos_token_ids)
    tokenizer = Tokenizer.from_folder(config.tokenizer or folder, config.tokenizer_mode)
    if config.chat_template is not None:
        tokenizer.use_chat_template(load_template(config.chat_template))
    if past := tokenizer.tokens_past(spec.vocab_size):
        logger.warning(
            "the model's vocabulary of %d lacks %d of the tokenizer's tokens, such as %r: prompts "
            "with them are refused",
            spec.vocab_size, len(past), past[0],
        )  # fmt: skip
    return tokenizer


def check_template(tokenizer: Tokenizer, config: ModelConfig) -> str:
    """Returns a warning if the chat template fails. Raises ConfigError for a syntax error."""
    own = "the checkpoint's chat template"
    where = own if config.chat_template is None else "--chat-template"
    try:
        failed = tokenizer.check_chat_template()
    except ConfigError as error:
        cure = " (--chat-template replaces it)" if where == own else ""
        raise ConfigError(f"{where}, {error.message}{cure}") from error
    return failed and f"{where} refuses a message of a user, and chats may fail: {failed}"


def load_template(given: str) -> str:
    """Reads `--chat-template`.

    Raises:
        ConfigError: it is neither a file nor a template.
    """
    try:
        if "{" not in given:
            return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--chat-template {given}: {why}") from error
    return given


def _load_defaults(config: ModelConfig, folder: Path) -> dict[str, Any]:
    """Reads the sampling defaults of `--generation-config`.

    Raises:
        ConfigError: the file cannot be read, or has a value that is out of range.
    """
    if config.generation_config == "vllm":
        return {}
    own = config.generation_config == "auto"
    file = (folder if own else Path(config.generation_config)) / "generation_config.json"
    if own and not file.is_file():
        return {}
    try:
        found = read_json(file)
        defaults = {name: found[name] for name in _DEFAULTS if found.get(name) is not None}
        for name, value in defaults.items():
            PARAMETERS[name].check_range(value)
            defaults[name] = int(value) if name == "top_k" else value
    except (ArithmeticError, ValueError, TypeError, ConfigError, InvalidRequest) as error:
        reason = error.message if isinstance(error, PdserveError) else error
        raise ConfigError(f"{file}: {reason} (--generation-config vllm ignores it)") from error
    if defaults:
        logger.info("defaults of %s: %s", file, defaults)
    return defaults
