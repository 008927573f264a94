"""Measures transformers' `generate`: 8 prompts of 128 tokens in a batch, 64 new tokens each.

    VENV/bin/python benchmarks/compared/generate.py MODEL DTYPE THREADS

`peers.py` runs this in an environment with transformers; it imports nothing else.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

BATCH, INPUT, OUTPUT = 8, 128, 64


def main() -> None:
    model_folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype))
    prompts = torch.randint(64, model.config.vocab_size, (BATCH, INPUT))
    _generate(model, prompts, 4)
    started = time.perf_counter()
    _generate(model, prompts, OUTPUT)
    print(json.dumps({"tok_s": BATCH * OUTPUT / (time.perf_counter() - started)}))


def _generate(model, prompts, count) -> None:  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )


if __name__ == "__main__":
    main()
