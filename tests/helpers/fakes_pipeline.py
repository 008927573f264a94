"""A fake generator with a given text, and tiny tokenizers of both common kinds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken, SamplingParams, TokenLogprobs
from pdserve.common.text.stream import TextStream
from pdserve.common.text.tokenizer import Tokenizer as ModelTokenizer
from pdserve.router.cluster.served_model import ServedModel
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    Outlet,
    Put,
    TextDelta,
    Updates,
    generate,
)
from pdserve.router.requests.timelines import Timelines

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '' if loop.last and continue_final_message else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_folder(folder: Path) -> Path:
    """Writes a tokenizer of GPT-2's kind: a token per byte, up to four per character; no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, folder, ["<|end|>", "<|im_start|>", "<|im_end|>"], eos="<|im_end|>")


def byte_fallback_folder(folder: Path) -> Path:
    """Writes a tokenizer of Llama's kind: ▁ for a space, of which decoding drops the first; byte
    tokens for characters outside of the vocabulary; a BOS."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorw", "▁w"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    bpe = models.BPE(vocab=vocab, merges=[("▁", "w")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return _save(tokenizer, folder, ["</s>"], eos="</s>", bos_token="<s>")


def _save(
    tokenizer: Tokenizer, folder: Path, special: list[str], *, eos: str, **config: Any
) -> Path:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {"eos_token": eos, "clean_up_tokenization_spaces": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def served_model(tokenizer: ModelTokenizer, **options: Any) -> ServedModel:
    """Returns a model `tiny` with a context window of 100 tokens."""
    defaults = {"names": ("tiny",), "root": "/tiny", "max_model_len": 100, "created": 0}
    defaults |= {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer}
    return ServedModel(**{**defaults, **options})


class FakeGenerator:
    """Every choice generates `text`, one token at a time, then EOS. Tests may change attributes
    between requests."""

    def __init__(self, tokenizer: ModelTokenizer, text: str = "hello world") -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.delay = 0.0  # seconds before each token
        self.error: Exception | None = None
        self.error_after = 0  # tokens
        self.not_ready = ""
        self.requests: list[GenerationRequest] = []
        self.open = 0
        self.tokens_said = 0
        self.closed = asyncio.Event()
        self.timelines = Timelines(kept=8)

    def check_room(self, client: str, tokens: int = 1) -> None:
        """It has room for all."""

    def generate(
        self, requests: Sequence[GenerationRequest], outlet: Outlet | None = None
    ) -> AsyncGenerator[Updates, None]:
        return generate(requests, self._serve, outlet)

    async def _serve(self, request: GenerationRequest, put: Put) -> GenerationStats:
        self.requests.append(request)
        self.open += 1
        try:
            return await self._say(request, put)
        finally:
            self.open -= 1
            self.closed.set()

    def ready(self) -> tuple[bool, str]:
        return not self.not_ready, self.not_ready

    def load(self) -> int:
        return self.open

    def cluster(self) -> dict[str, Any]:
        return {"nodes": []}

    async def _say(self, request: GenerationRequest, put: Put) -> GenerationStats:
        eos = self.tokenizer.eos_token_ids[0]
        said = [*self.tokenizer.encode(self.text, add_special_tokens=False), eos]
        said = said[: request.sampling.max_tokens]
        streams = {choice: self._stream(request) for choice in range(request.n)}
        total = 0
        for position, token_id in enumerate(said):
            if self.error is not None and position == self.error_after:
                raise self.error
            await asyncio.sleep(self.delay)
            reason = FinishReason.STOP if token_id == eos else None
            if position == len(said) - 1:
                reason = reason or FinishReason.LENGTH
            self.tokens_said += 1
            for choice in list(streams):
                total += 1
                output = streams[choice].push(
                    [token_id], final=reason is not None, stop_token=reason is FinishReason.STOP
                )
                ended = FinishReason.STOP if output.stopped_by else reason
                if ended:
                    del streams[choice]
                token = _sampled(token_id, request.sampling)
                if request.prompt_only:
                    put(TextDelta(choice, "", (), FinishReason.LENGTH))
                else:
                    put(TextDelta(choice, output.text, (token,), ended, output.stopped_by))
        return GenerationStats(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=0 if request.prompt_only else total,
            cached_tokens=3,
            timeline=Timeline(first_token=0.5, transfer_bytes=7),
        )

    def _stream(self, request: GenerationRequest) -> TextStream:
        return TextStream(
            self.tokenizer,
            stop=request.stop,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.sampling.min_tokens,
            before=request.before,
        )


def _sampled(token_id: int, sampling: SamplingParams) -> SampledToken:
    if sampling.logprobs is None:
        return SampledToken(token_id)
    others = tuple((token_id + k, -0.5 - k) for k in range(sampling.logprobs))
    return SampledToken(token_id, TokenLogprobs(-0.5, others))
