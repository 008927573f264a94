"""Measures the TTFT of later turns of a chat: computed by a prefill node, or by the decode node
that generated the previous answer (--local-prefill-threshold).

    python benchmarks/bench_turns.py [--model FOLDER] [--chats 6] [--turns 4] [--json FILE]

Each turn's prompt is the one before, its answer, and a message. A cluster of one prefill and one
decode node answers one chat after the other; both ways take the same prompts. The first chat finds
cold nodes and does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pdserve import LLM, SamplingParams
from pdserve.simulate.calibrate import ONE_OF_EACH, VOCABULARY
from pdserve.simulate.outcome import table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a checkpoint folder (default: the embedded model)")
    add("--chats", type=int, default=6)
    add("--turns", type=int, default=4)
    add("--first-tokens", type=int, default=256, help="tokens of a chat's first prompt")
    add("--message-tokens", type=int, default=24)
    add("--answer-tokens", type=int, default=96)
    add("--json", type=Path)
    args = parser.parse_args(argv)
    ways = {"prefill node": 0, "decode node": 2 * args.message_tokens + 16}
    answers, rows = [], []
    for name, threshold in ways.items():
        options = {"local_prefill_threshold": threshold, "decode_policy": "prefix-aware"}
        with LLM(args.model, cpu_threads=1, **ONE_OF_EACH, **options) as llm:
            _, *found = (chat(llm, args, number) for number in range(1 + args.chats))
        answers.append([each[0] for each in found])
        ttft = sorted(seconds for each in found for seconds in each[1])
        rows.append(
            {
                "later turns are computed by": name,
                "ttft_mean_ms": round(1e3 * fmean(ttft), 1),
                "ttft_p50_ms": round(1e3 * median(ttft), 1),
                "cached": round(fmean(share for each in found for share in each[2]), 3),
            }
        )
    rows[1]["ttft_lower"] = f"{100 * (1 - rows[1]['ttft_mean_ms'] / rows[0]['ttft_mean_ms']):.0f} %"
    rows[0]["ttft_lower"] = None
    print(table(rows), "\n\nthe same tokens:", answers[0] == answers[1])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if answers[0] == answers[1] else 1


def chat(
    llm: LLM, args: argparse.Namespace, number: int
) -> tuple[list[list[int]], list[float], list[float]]:
    """Returns the answers of a chat and, for each turn after the first, TTFT in seconds and the
    cached share of the prompt."""
    chance, ttft, shares = random.Random(number), list[float](), list[float]()
    prompt, answers = chance.choices(VOCABULARY, k=args.first_tokens), list[list[int]]()
    params = SamplingParams(max_tokens=args.answer_tokens, temperature=0, ignore_eos=True)
    for turn in range(args.turns):
        asked: dict[str, Any] = {"prompt_token_ids": prompt}
        (output,) = llm.generate(asked, params, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
        if turn:
            ttft.append(output.timeline["first_token"])
            shares.append(output.num_cached_tokens / len(prompt))
        prompt = [*prompt, *answers[-1], *chance.choices(VOCABULARY, k=args.message_tokens)]
    return answers, ttft, shares


if __name__ == "__main__":
    sys.exit(main())
