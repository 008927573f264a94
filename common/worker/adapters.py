"""The LoRA adapters of one rank. The node loads and drops them with calls, which are served while
steps run; a step names them by digest, and the node only names loaded ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.lora import read_adapter
from pdserve.common.distributed.executor import Extension
from pdserve.common.engine.messages import (
    LOADED,
    AdapterCall,
    DropAdapter,
    LoadAdapter,
    decode_adapter_call,
)
from pdserve.common.model.decoder import Decoder
from pdserve.common.model.lora import Pairs, StepLoRA, load_pairs
from pdserve.common.model.staging import upload
from pdserve.common.worker.input_batch import StepSequence


class RankAdapters:
    """This rank's part of each loaded adapter, by digest."""

    def __init__(self, model: Decoder, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._pairs: dict[str, Pairs] = {}
        self._loading: dict[str, Future[Pairs]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def serve(self, call: AdapterCall) -> bytes:
        """Serves a call; see `messages.py` for the answers.

        Raises:
            ConfigError: this host's copy of the adapter is invalid or differs from the node's.
        """
        match call:
            case LoadAdapter(digest, path):
                return self._load(digest, path)
            case DropAdapter(digest):
                self._loading.pop(digest, None)
                self._pairs.pop(digest, None)
                return b""

    def _load(self, digest: str, path: str) -> bytes:
        if digest in self._pairs:
            return LOADED
        if digest not in self._loading:
            self._loading[digest] = self._thread.submit(self._read, digest, path)
        if not self._loading[digest].done():
            return b""
        self._pairs[digest] = self._loading.pop(digest).result()
        return LOADED

    def _read(self, digest: str, path: str) -> Pairs:
        file = read_adapter(path, self._model.spec, self._max_rank)
        if file.digest != digest:
            raise ConfigError(f"adapter {path} differs on this host: digest {file.digest}")
        return load_pairs(self._model, file)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def of_step(self, sequences: Sequence[StepSequence]) -> StepLoRA | None:
        """Returns the adapters of a step's rows, None if no sequence has one.

        Raises:
            NodeError: an adapter is not loaded.
        """
        rows: defaultdict[str, list[range]] = defaultdict(list)
        end = 0
        for sequence in sequences:
            start, end = end, end + sequence.num_tokens
            rows[sequence.adapter].append(range(start, end))
        if rows.keys() <= {""}:
            return None
        alone = len(rows) == 1
        rows.pop("", None)
        return StepLoRA(
            [(self._find(each), None if alone else self._place(of)) for each, of in rows.items()]
        )

    def _find(self, digest: str) -> Pairs:
        if digest not in self._pairs:
            raise NodeError(f"adapter {digest} is not loaded", code="ADAPTER_NOT_LOADED")
        return self._pairs[digest]

    def _place(self, parts: Sequence[range]) -> Tensor:
        where = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        return upload(where, self._model.device)


class AdapterExtension:
    """An extension that serves adapter calls and passes others on to `inner`."""

    def __init__(self, adapters: RankAdapters, inner: Extension | None) -> None:
        self._adapters = adapters
        self._inner = inner

    def info(self) -> bytes:
        return self._inner.info() if self._inner is not None else b""

    def handle(self, message: bytes) -> bytes:
        call = decode_adapter_call(message)
        if call is None:
            return self._others().handle(message)
        return self._adapters.serve(call)

    def handle_at_once(self, message: bytes) -> bytes | None:
        if decode_adapter_call(message) is not None:
            return None
        return self._others().handle_at_once(message)

    def close(self, deadline: float) -> None:
        self._adapters.close()
        if self._inner is not None:
            self._inner.close(deadline)

    def _others(self) -> Extension:
        if self._inner is None:
            raise NodeError("this rank has no extension")
        return self._inner
