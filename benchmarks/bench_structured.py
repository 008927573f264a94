"""Measures structured output: CPU time per token with and without a grammar, and to compile it.

    python benchmarks/bench_structured.py --model FOLDER [--rows 1 16 64] [--tokens 100] [--json F]

Per kind of grammar: `compile` includes the first mask; `mask` is advancing by a token and computing
the next mask, on a text of the grammar; `sample` is the sampler of a step with N rows that all have
a mask, `without` that of rows without. All are CPU microseconds per row. On a GPU the masks of a
step are computed while it computes logits.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.common.text.grammar import GrammarTokens, Matcher, to_grammar
from pdserve.common.text.tokenizer_file import read_tokenizer_json
from pdserve.common.worker.input_batch import StepSequence
from pdserve.common.worker.sampler import sample

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
        },
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "address", "tags"],
}
TEXT = json.dumps(
    {
        "name": "Ada Lovelace",
        "age": 36,
        "address": {"street": "12 St James's Square", "city": "London"},
        "tags": ["red", "blue", "green"] * 9,
    }
)
CASES = {
    "json_object": (ConstraintKind.JSON, '{"type":"object"}', TEXT),
    "json_schema": (ConstraintKind.JSON, json.dumps(PERSON), TEXT),
    "regex": (ConstraintKind.REGEX, r"([A-Z][a-z]+ [0-9]{1,4}[,.] )+", "The 12, Of 77. " * 9),
    "choice": (ConstraintKind.CHOICE, json.dumps([f"option {i}" for i in range(500)]), "option 42"),
    "grammar": (
        ConstraintKind.GRAMMAR,
        'start: sum\nsum: product ("+" product)*\nproduct: atom ("*" atom)*\n'
        'atom: /[0-9]+/ | "(" sum ")"',
        "(12+(3*4)+5)*(6+7*(8+9))+" * 6 + "1",
    ),
}  # fmt: skip


def timed(work: Callable[[], object], times: int = 1) -> float:
    """Returns the CPU microseconds per run."""
    start = time.thread_time()
    for _ in range(times):
        work()
    return 1e6 * (time.thread_time() - start) / times


def measure_masks(
    tokens: GrammarTokens, kind: ConstraintKind, text: str, answer: str, limit: int
) -> tuple[dict[str, float], bytes]:
    grammar = to_grammar(StructuredOutput(kind, text))
    compiled: list[Matcher] = []
    first = timed(lambda: (compiled.append(Matcher.compile(tokens, grammar)), compiled[0].mask()))
    matcher = compiled[0].copy()
    times = []
    mask = matcher.mask()
    for token in tokens.library.tokenize_str(answer)[:limit]:
        times.append(timed(lambda token=token: (matcher.advance([token]), matcher.mask())))
        mask = matcher.mask()
    return {"compile": first, "mask": mean(times), "mask_max": max(times)}, mask


def measure_sampler(vocab: int, rows: int, mask: bytes | None, temperature: float) -> float:
    words = None if mask is None else np.frombuffer(mask, np.int32)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature)
    batch = [
        StepSequence(i, (5,), 7, (0,), params, seed=random.Random(i).randrange(99), mask=words)
        for i in range(rows)
    ]
    sample(logits, batch).results()
    return timed(lambda: sample(logits, batch).results(), times=10) / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = ModelSpec.from_folder(args.model)
    text = read_tokenizer_json(args.model, None, None)
    loading = timed(lambda: GrammarTokens(text, spec.vocab_size, spec.eos_token_ids))
    tokens = GrammarTokens(text, spec.vocab_size, spec.eos_token_ids)
    results: list[dict[str, object]] = []
    masks = {}
    for name, (kind, constraint, answer) in CASES.items():
        figures, masks[name] = measure_masks(tokens, kind, constraint, answer, args.tokens)
        results.append({"grammar": name, **figures})
    for rows in args.rows:
        for temperature in (0.0, 1.0):
            results.append(
                {
                    "rows": rows,
                    "temperature": temperature,
                    "without": measure_sampler(spec.vocab_size, rows, None, temperature),
                    "sample": measure_sampler(
                        spec.vocab_size, rows, masks["json_schema"], temperature
                    ),
                }
            )
    show(results, spec.vocab_size, loading)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def show(results: list[dict[str, object]], vocab: int, loading: float) -> None:
    console = Console()
    console.print(f"{vocab} tokens; the vocabulary takes {loading / 1e6:.2f} s, once")
    for key in ("grammar", "rows"):
        rows = [each for each in results if key in each]
        table = Table(*rows[0], title="µs of CPU")
        for each in rows:
            table.add_row(*(f"{v:.0f}" if isinstance(v, float) else str(v) for v in each.values()))
        console.print(table)


if __name__ == "__main__":
    main()
