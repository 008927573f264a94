"""The folders that a rank reads, each from its own disk or, with --load-broadcast, from that of the
first rank that has them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pdserve.common.config.engine import EngineConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.broadcast import BroadcastFolder
from pdserve.common.model.checkpoint import weights_revision
from pdserve.common.model.folder import ModelFolder
from pdserve.common.model.implementation import read_spec
from pdserve.common.text.grammar import GrammarTokens
from pdserve.common.text.tokenizer_file import read_tokenizer_json


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The model, and what is not in its folder."""

    engine: EngineConfig
    model: ModelFolder
    tokenizer: ModelFolder | None
    draft: ModelFolder | None

    def read_model(self) -> tuple[ModelSpec, int]:
        """Returns the model's spec and the context window in tokens. Raises ConfigError."""
        config = self.engine.model
        with self.model.files() as folder:
            spec = read_spec(folder, config.model_impl, config.overrides)
        max_model_len = config.context(spec.max_position_embeddings)
        spec.check_max_model_len(max_model_len)
        spec.check_kv_cache_dtype(self.engine.cache.kv_cache_dtype)
        return spec, max_model_len

    def check_revision(self, revision: str) -> None:
        """Raises ConfigError if this host's copy of the weights is not of the node's `revision`. It
        looks at a page of each tensor; weights from another rank are always of one copy."""
        config = self.engine.model
        if isinstance(self.model, BroadcastFolder):
            return
        given = config.load_format, config.seed, config.overrides
        if (found := weights_revision(self.model.path, *given)) != revision:
            raise ConfigError(
                f"host {socket.gethostname()} has other weights in {self.model.path} (revision "
                f"{found}) than the node's host ({revision}): give all hosts of a node the same "
                "copy, or pass --load-broadcast"
            )

    def read_grammar_tokens(self, spec: ModelSpec) -> GrammarTokens:
        """Reads the same tokenizer as the router."""
        config = self.engine.model
        with ExitStack() as stack:
            text = read_tokenizer_json(
                str(stack.enter_context(self.model.files())),
                str(stack.enter_context(self.tokenizer.files())) if self.tokenizer else None,
                spec.vocab_size if config.load_format == "dummy" else None,
                config.tokenizer_mode,
            )
        return GrammarTokens(text, spec.vocab_size, spec.eos_token_ids)


def open_folders(engine: EngineConfig, world: GroupCoordinator) -> ModelFolders:
    """Returns the folders of the options; a collective call of the ranks of `world`.

    Raises:
        ConfigError: this host has no such folder, or with --load-broadcast none has all.
    """
    config, speculation = engine.model, engine.speculation.speculation
    if config.model is None:
        raise ConfigError("--model must name a checkpoint folder")
    draft = speculation.model if speculation else None
    open_folder: Callable[[str], ModelFolder] = ModelFolder
    if config.load_broadcast and world.size > 1:
        given = [path for path in (config.model, config.tokenizer, draft) if path]
        open_folder = partial(BroadcastFolder, group=world, src=_first_with(given, world))
    else:
        _check_folder(config.model)
    return ModelFolders(
        engine,
        open_folder(config.model),
        open_folder(config.tokenizer) if config.tokenizer else None,
        open_folder(draft) if draft else None,
    )


def _check_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise ConfigError(
            f"host {socket.gethostname()} has no folder {path}: every host of a node needs the "
            "model at the same path, unless --load-broadcast sends it"
        )


def _first_with(paths: list[str], world: GroupCoordinator) -> int:
    """Returns the first rank whose host has all folders."""
    missing = [path for path in paths if not os.path.isdir(path)]
    lacking = "" if not missing else f"{socket.gethostname()} lacks {', '.join(missing)}"
    answers = world.all_gather_bytes(lacking.encode())
    if b"" in answers:
        return answers.index(b"")
    hosts = "; ".join(sorted({answer.decode() for answer in answers}))
    raise ConfigError(
        f"--load-broadcast needs a rank whose host has the model, and none has: {hosts}"
    )
