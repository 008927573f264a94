"""Measures the error, size and speed of quantized weights compared with float32.

Each model is computed in float32, with `--quantization int8`, and as an AWQ and a GPTQ checkpoint.
The last two are made here by rounding to nearest, without calibration, so their errors are upper
bounds: real AWQ and GPTQ checkpoints choose scales and roundings on sample text. In bfloat16 they
are computed twice: dequantized for each product, and with kernels that multiply 4-bit weights by
8-bit tokens. Speeds are of one sequence on this CPU, in CPU time of one thread, both in turns.

    python benchmarks/quantization_error.py [--models FOLDER,...] [--group-size 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from quantized_folder import Scheme, quantize_folder
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import kv_row
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.device import choose_kernels, dtype_name
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from pdserve.demo_model.embedded import ensure_embedded_model

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))
from story_grammar import make_corpus  # noqa: E402

CPU = torch.device("cpu")
PLAIN = Sharding(GroupCoordinator(), CPU, torch.float32)
DEQUANTIZED = replace(PLAIN, dtype=torch.bfloat16)
BLOCK_SIZE = 16
TEXT_TOKENS = 256  # per story
PROMPT_TOKENS = 48  # of a continuation
ROUNDS = 12  # of each timing; the best counts
COLUMNS = ("max Δlogit", "mean Δlogit", "perplexity", "same top", "same greedy")


@dataclass(frozen=True)
class Result:
    """Errors are relative to the same model in float32."""

    model: str
    weights: str
    weights_bytes: int
    weight_error: float  # ‖W' - W‖ / ‖W‖ over all linear layers
    errors: Errors
    prefill_speed: float
    decode_speed: float


class Subject:
    """One model with one kind of weights."""

    def __init__(
        self, folder: Path, quantization: str | None = None, sharding: Sharding = PLAIN
    ) -> None:
        spec, config = (
            ModelSpec.from_folder(folder),
            ModelConfig(model=str(folder), quantization=quantization),
        )
        self.model = load_model(spec, config, sharding)
        (attention,) = self.model.attentions
        numbers, dtype = kv_row(
            attention.shape.head_dim, dtype_name(sharding.dtype), sharding.kv_cache_dtype
        )
        size = (spec.num_layers, 2, 128, attention.shape.num_kv_heads, BLOCK_SIZE, numbers)
        self.cache = torch.zeros(size, dtype=getattr(torch, dtype))

    def logits(self, tokens: Sequence[int], start: int = 0) -> Tensor:
        """Returns the logits of each token."""
        blocks = list(range(-(-(start + len(tokens)) // BLOCK_SIZE)))
        batch = AttentionBatch([len(tokens)], [start], [blocks], BLOCK_SIZE)
        positions = torch.arange(start, start + len(tokens))
        contexts = self.model.prepare([batch])
        hidden = self.model.forward(torch.tensor(tokens), positions, contexts, [self.cache])
        return self.model.compute_logits(hidden)

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns a greedy continuation."""
        tokens = [int(self.logits(prompt)[-1].argmax())]
        while len(tokens) < count:
            position = len(prompt) + len(tokens) - 1
            tokens.append(int(self.logits(tokens[-1:], position)[0].argmax()))
        return tokens

    def matrices(self) -> Iterator[Tensor]:
        """Returns the dense matrix of each linear layer."""
        for layer in self.model.layers:
            attention, mlp = layer.attention, layer.mlp
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                yield linear.weight.dense()


@dataclass(frozen=True)
class Errors:
    """Differences between two models over some texts."""

    max_logit_error: float
    mean_logit_error: float
    perplexity: float
    equal_top_tokens: float  # share of positions with the same most likely token
    equal_greedy_tokens: float  # share of a continuation before the first difference

    @classmethod
    def of(cls, exact: Subject, other: Subject, texts: list[list[int]], count: int) -> Errors:
        """`count`: tokens of a continuation."""
        errors, losses, tops, greedy = [], [], [], []
        for text in texts:
            expected, found = exact.logits(text), other.logits(text)
            errors.append((expected - found).abs())
            losses.append(float(F.cross_entropy(found[:-1], torch.tensor(text[1:]))))
            tops.append(float((expected.argmax(-1) == found.argmax(-1)).float().mean()))
            ends = (each.continuation(text[:PROMPT_TOKENS], count) for each in (exact, other))
            greedy.append(agreement(*ends))
        return cls(
            max_logit_error=max(float(each.max()) for each in errors),
            mean_logit_error=fmean(float(each.mean()) for each in errors),
            perplexity=exp(fmean(losses)),
            equal_top_tokens=fmean(tops),
            equal_greedy_tokens=fmean(greedy),
        )

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of COLUMNS."""
        return (
            *(f"{self.max_logit_error:.3f}", f"{self.mean_logit_error:.4f}"),
            *(f"{self.perplexity:.4f}", f"{self.equal_top_tokens:.1%}"),
            f"{self.equal_greedy_tokens:.1%}",
        )


def measure(
    name: str, kind: str, exact: Subject, other: Subject, texts: list[list[int]], count: int
) -> Result:
    return Result(
        model=name,
        weights=kind,
        weights_bytes=other.model.weights_bytes,
        weight_error=weight_error(exact, other),
        errors=Errors.of(exact, other, texts, count),
        prefill_speed=speed(lambda each: each.logits(texts[0]), exact, other),
        decode_speed=decode_speed(texts[0], exact, other),
    )


def decode_speed(text: list[int], exact: Subject, other: Subject) -> float:
    return speed(lambda each: each.logits(text[-1:], len(text) - 1), exact, other)


def weight_error(exact: Subject, other: Subject) -> float:
    difference = total = 0.0
    for ours, theirs in zip(exact.matrices(), other.matrices(), strict=True):
        difference += float((ours - theirs).square().sum())
        total += float(ours.square().sum())
    return float((difference / total) ** 0.5)


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    equal = [a == b for a, b in zip(one, other, strict=True)]
    return equal.index(False) / len(equal) if False in equal else 1.0


def speed(work: Callable[[Subject], object], exact: Subject, other: Subject) -> float:
    """Returns the speed of `other` relative to `exact`, measured in turns."""
    best = {exact: float("inf"), other: float("inf")}
    for _ in range(ROUNDS):
        for subject in (exact, other):
            started = time.thread_time()
            work(subject)
            best[subject] = min(best[subject], time.thread_time() - started)
    return best[exact] / best[other]


def texts_of(folder: Path, num_texts: int) -> list[list[int]]:
    """Returns stories of TEXT_TOKENS tokens each."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    stories = make_corpus(seed=11, count=4 * num_texts, chat_share=0.0)
    texts = [tokenizer.encode(story, verbose=False)[:TEXT_TOKENS] for story in stories]
    return [text for text in texts if len(text) == TEXT_TOKENS][:num_texts]


def results_of(folder: Path, group_size: int, num_texts: int, count: int) -> Iterator[Result]:
    texts = texts_of(folder, num_texts)
    exact = Subject(folder)
    schemes = {"awq int4": Scheme("awq", group_size=group_size)}
    schemes["gptq int4"] = Scheme("gptq", group_size=group_size, sym=True)
    native = replace(DEQUANTIZED, kernels=choose_kernels("auto", CPU))
    ways = {"": PLAIN, " bfloat16 dequantized": DEQUANTIZED, " bfloat16 kernels": native}
    with ExitStack() as stack:
        yield measure(folder.name, "float32", exact, Subject(folder), texts, count)
        plain = Subject(folder, sharding=native)
        yield measure(folder.name, "bfloat16", exact, plain, texts, count)
        yield measure(folder.name, "int8", exact, Subject(folder, "int8"), texts, count)
        for kind, scheme in schemes.items():
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made = quantize_folder(folder, place / folder.name, scheme)
            for how, sharding in ways.items():
                other = Subject(made, sharding=sharding)
                yield measure(folder.name, f"{kind}{how}", exact, other, texts, count)


def default_models() -> list[Path]:
    """Returns the tiny checkpoints, and the embedded model if it is installed."""
    folders = [ROOT / "tests" / "models" / name for name in ("llama-gqa", "mistral", "qwen2")]
    folders.append(ROOT / "tests" / "models" / "qwen3")
    try:
        folders.append(ensure_embedded_model())
    except ConfigError as error:
        print(f"without the embedded model: {error}")
    return folders


def show(results: Sequence[Result]) -> None:
    table = Table("model", "weights", "MB", "‖ΔW‖/‖W‖", *COLUMNS, "prefill ×", "decode ×")
    for each in results:
        table.add_row(
            *(each.model, each.weights, f"{each.weights_bytes / 1e6:.2f}"),
            *(f"{each.weight_error:.2%}", *each.errors.cells()),
            *(f"{each.prefill_speed:.2f}", f"{each.decode_speed:.2f}"),
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", help="checkpoint folders, separated by commas")
    parser.add_argument("--group-size", type=int, default=64, help="inputs that share a scale")
    parser.add_argument("--texts", type=int, default=4, help="number of stories")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per greedy continuation")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    folders = [Path(name) for name in args.models.split(",")] if args.models else default_models()
    torch.set_num_threads(1)
    with torch.inference_mode():
        results = [
            result
            for folder in folders
            for result in results_of(folder, args.group_size, args.texts, args.tokens)
        ]
    show(results)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(each) for each in results], indent=2))


if __name__ == "__main__":
    main()
