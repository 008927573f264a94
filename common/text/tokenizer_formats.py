"""Finds a checkpoint's tokenizer, and converts other formats to `tokenizer.json`.

    tokenizer.json    used as it is
    tekken.json       Mistral's; the chat template is the one that mistral-common makes from it
    tokenizer.model   sentencepiece's

Detokenizing and grammars know one kind of tokenizer only. transformers does both conversions; the
one of a sentencepiece model is compared with sentencepiece itself on each load, before `legacy` of
tokenizer_config.json applies.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.common.core.checkpoint_config import MAX_JSON, read_json
from pdserve.common.core.errors import ConfigError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedTokenizerFast

_PROBES = (
    "Hello world",
    "  two  spaces\n",
    " a",
    "a\n\n\tb",
    "é 東京 👍🏽 \u0301",
    "f(x) == 12345;",
    "",
)


_CONVERSION_TIMEOUT = 600.0  # seconds


class TokenizerSource(Enum):
    """The file that a tokenizer is read from."""

    JSON = "tokenizer.json"
    TEKKEN = "tekken.json"
    SENTENCEPIECE = "tokenizer.model"


def find_source(folder: str | Path, mode: str = "auto") -> TokenizerSource:
    """Returns the kind of file to read. `mode` is that of --tokenizer-mode.

    Raises:
        ConfigError: there is none, or only code that would have to be run.
    """
    folder = Path(folder)
    there = [source for source in TokenizerSource if (folder / source.value).is_file()]
    if mode == "mistral":
        if TokenizerSource.TEKKEN not in there:
            raise ConfigError(f"{folder} has no tekken.json, which --tokenizer-mode mistral needs")
        return _not_too_large(folder, TokenizerSource.TEKKEN)
    if mode == "hf":
        there = [source for source in there if source is not TokenizerSource.TEKKEN]
    if there:
        return _not_too_large(folder, there[0])
    if _is_code(folder):
        raise ConfigError(
            f"the tokenizer in {folder} is Python code (auto_map in tokenizer_config.json), which "
            "is never run; name a folder with a tokenizer.json by --tokenizer"
        )
    raise ConfigError(
        f"{folder} has no tokenizer.json, tekken.json or tokenizer.model; name a folder that has "
        "one with --tokenizer"
    )


def _not_too_large(folder: Path, source: TokenizerSource) -> TokenizerSource:
    if (folder / source.value).stat().st_size > MAX_JSON:
        raise ConfigError(f"{folder / source.value} has more than {MAX_JSON} bytes")
    return source


def _is_code(folder: Path) -> bool:
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("auto_map"))
    except ConfigError:
        return False


def convert(folder: str | Path, source: TokenizerSource) -> PreTrainedTokenizerFast:
    """Reads a tokenizer that is no `tokenizer.json`.

    Raises:
        ConfigError: a package is missing, or the conversion differs from the original.
    """
    if source is TokenizerSource.TEKKEN:
        return _of_tekken(Path(folder))
    return _of_sentencepiece(Path(folder))


def converted_json(folder: str | Path, source: TokenizerSource) -> str:
    """Returns the `tokenizer.json` that `convert` makes, in a process of its own: it takes seconds,
    during which other threads of this process would not run.

    Raises:
        ConfigError: as `convert`.
    """
    command = [sys.executable, "-X", "utf8", "-m", __name__, str(folder), source.name]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=_CONVERSION_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"converting the tokenizer in {folder} takes too long") from error
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"cannot read the tokenizer in {folder}: {said}")
    return done.stdout


def _of_tekken(folder: Path) -> PreTrainedTokenizerFast:
    _need("mistral_common", "mistral", folder / TokenizerSource.TEKKEN.value)
    from mistral_common.integrations.chat_templates.chat_templates import (
        convert_tokenizer_to_chat_template,
    )
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    begin = ("<s>", hf.backend_tokenizer.token_to_id("<s>"))
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[begin]
    )
    if not hf.chat_template:
        hf.chat_template = convert_tokenizer_to_chat_template(folder / TokenizerSource.TEKKEN.value)
    return hf


def _of_sentencepiece(folder: Path) -> PreTrainedTokenizerFast:
    file = folder / TokenizerSource.SENTENCEPIECE.value
    _need("sentencepiece", "sentencepiece", file)
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerFast

    original = SentencePieceProcessor(model_file=str(file))
    # The option `legacy` of transformers is sentencepiece's own way: a space before each part of a
    # text between special tokens, not before its first part alone.
    hf = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, legacy=True)
    for probe in _PROBES:
        converted = hf.backend_tokenizer.encode(probe, add_special_tokens=False).ids
        if converted != original.encode(probe):
            raise ConfigError(
                f"{file} cannot be converted exactly: {probe!r} has other tokens; name a folder "
                "with a tokenizer.json by --tokenizer"
            )
    if _is_legacy(folder):
        return hf
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, legacy=False)


def _is_legacy(folder: Path) -> bool:
    """Returns `legacy` of tokenizer_config.json, by default true as in sentencepiece."""
    config = folder / "tokenizer_config.json"
    return not config.is_file() or read_json(config).get("legacy") is not False


def _need(package: str, extra: str, file: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{file} needs the package {package.replace('_', '-')}: pip install 'pdserve[{extra}]'"
        )


if __name__ == "__main__":  # what `converted_json` runs
    sys.stdout.write(convert(sys.argv[1], TokenizerSource[sys.argv[2]]).backend_tokenizer.to_str())
