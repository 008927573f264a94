"""What transformers says: the greedy continuation every topology must give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


@cache
def load(folder: Path) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """The model in float32 and its tokenizer."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


@cache
def greedy(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The next tokens by greedy search; end-of-sequence tokens do not end it."""
    model, _ = load(folder)
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())


def encode(folder: Path, text: str) -> list[int]:
    _, tokenizer = load(folder)
    return list(tokenizer(text)["input_ids"])


def decode(folder: Path, token_ids: Sequence[int]) -> str:
    _, tokenizer = load(folder)
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
