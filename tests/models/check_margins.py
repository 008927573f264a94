"""Measure how clearly greedy decoding is decided for each checkpoint.

    python tests/models/check_margins.py [--show]

For prompts of 1 to 600 tokens it generates 64 tokens with transformers in fp32 and prints how
large the gap between the best and the second-best logit was.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from story_grammar import IM_END, IM_START, make_corpus
from train import HERE, SHARD_SIZES

NEW_TOKENS = 64
PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a brave girl named Zoë.",
    "Day 3. The sun was warm and bright ☀.",
    '"Good morning, Lily!" said señor Paco.',
    "They made jalapeño soup for Uncle Björn. First they took",
    f"{IM_START}user\nTell me a story about Tom.{IM_END}\n{IM_START}assistant\n",
    f"{IM_START}user\nTell me a story of 3 days about 小明.{IM_END}\n{IM_START}assistant\n",
)


def make_prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Token ids of single-token, short, 200-token and 600-token prompts."""
    texts = [tokenizer.encode(text) for text in PROMPTS]
    stories = make_corpus(seed=7, count=60, chat_share=0.0)
    long = [tokenizer.encode(text, verbose=False) for text in stories]
    long = [ids for ids in long if len(ids) > 700][:4]
    single = [[tokenizer.eos_token_id], tokenizer.encode("The")[:1]]
    return single + texts + [ids[:200] for ids in long] + [ids[:600] for ids in long]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The greedy continuation, end tokens ignored, and the margin of each of its tokens."""
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def measure(name: str, show: bool) -> None:
    """Print the margins of one checkpoint."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / name)
    model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).train(False)
    margins: list[float] = []
    for prompt in make_prompts(tokenizer):
        tokens, found = greedy(model, prompt)
        margins += found
        if show:
            print(f"{len(prompt)} tokens, margin {min(found):.3f}: {tokenizer.decode(tokens)!r}")
    ordered = sorted(margins)
    smallest = ", ".join(f"{margin:.3f}" for margin in ordered[:5])
    below = {limit: sum(margin < limit for margin in ordered) for limit in (0.01, 0.1, 0.5)}
    median = ordered[len(ordered) // 2]
    print(f"{name}: {len(ordered)} tokens, smallest {smallest}, median {median:.2f}, below {below}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure greedy logit margins.")
    parser.add_argument("--show", action="store_true", help="print the continuations too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in SHARD_SIZES:
        measure(name, options.show)
