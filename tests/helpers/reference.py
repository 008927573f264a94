"""transformers' greedy continuations, which every topology must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)


@cache
def load(folder: Path) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """Returns the model in float32 and its tokenizer."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


class Only(LogitsProcessor):
    """Restricts the choice to some tokens."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self.allowed = list(allowed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        restricted = torch.full_like(scores, -torch.inf)
        restricted[:, self.allowed] = scores[:, self.allowed]
        return restricted


@cache
def greedy(
    folder: Path,
    prompt: tuple[int, ...],
    num_tokens: int,
    allowed: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> tuple[int, ...]:
    """Returns the next tokens by greedy search, among `allowed` (none: all), without completing a
    bad word; end-of-sequence tokens do not end it."""
    model, _ = load(folder)
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            bad_words_ids=list(map(list, bad_words)) or None,
            logits_processor=LogitsProcessorList([Only(allowed)] if allowed else []),
        )
    return tuple(output[0, len(prompt) :].tolist())


def margin(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> float:
    """Returns the smallest difference of the best and second logit over `greedy`'s tokens."""
    model, _ = load(folder)
    tokens = torch.tensor([prompt + greedy(folder, prompt, num_tokens)])
    with torch.inference_mode():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    return float((best - second).min())


@cache
def prompt_logprobs(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """Returns `[len(prompt) - 1, vocab]`; row i is the distribution after token i."""
    model, _ = load(folder)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)


def bad_words(folder: Path, *words: str) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of words, with and without a leading space."""
    forms = [form for word in words for form in (word, f" {word}")]
    return tuple(tuple(encode(folder, form)) for form in forms)


def encode(folder: Path, text: str) -> list[int]:
    _, tokenizer = load(folder)
    return list(tokenizer(text)["input_ids"])


def decode(folder: Path, token_ids: Sequence[int]) -> str:
    _, tokenizer = load(folder)
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
