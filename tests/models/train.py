"""Train the tiny checkpoints that the token-exact tests compare against transformers.

    python tests/models/train.py [--only NAME] [--steps N]

Everything is seeded. The folders written are loadable by transformers and hold bf16 safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from story_grammar import END_OF_TEXT, IM_END, IM_START, make_corpus

HERE = Path(__file__).resolve().parent
SEED = 20240607
VOCAB_SIZE = 512
MAX_POSITIONS = 1024
SHORT_LENGTH, LONG_LENGTH, TOKENS_PER_STEP = 384, 1024, 3072
TRAIN_DOCUMENTS, VALIDATION_DOCUMENTS = 6000, 100
LEARNING_RATE, WARMUP_STEPS = 4e-3, 40
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# An input embedding of its own would never train the row of the padding token, which is the
# end-of-text token too and has to work as a prompt.
UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "pad_token_id": None}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def build(name: str) -> PreTrainedModel:
    """The untrained model of one folder."""
    if name == "llama-gqa":
        sizes = SIZES | {"head_dim": 32, "tie_word_embeddings": True}
        return LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=LLAMA3_ROPE))
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**(SIZES | UNTIED), rope_parameters=PLAIN_ROPE))
    if name == "qwen3":
        sizes = SIZES | {"hidden_size": 96, "head_dim": 32, "tie_word_embeddings": True}
        rope = PLAIN_ROPE | {"rope_theta": 1000000.0}
        return Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters=rope))
    if name == "mistral":
        sizes = SIZES | UNTIED | {"head_dim": 32, "sliding_window": None}
        return MistralForCausalLM(MistralConfig(**sizes, rope_parameters=PLAIN_ROPE))
    return build_sparse(name)


def build_sparse(name: str) -> PreTrainedModel:
    """The untrained mixture of experts of one folder: top 2 of 8."""
    sizes = SIZES | {"hidden_size": 96, "num_experts_per_tok": 2, "output_router_logits": True}
    sizes |= {"router_aux_loss_coef": 0.01}  # or a few experts would take everything
    if name == "mixtral":
        sizes |= UNTIED | {"num_local_experts": 8, "intermediate_size": 64}
        return MixtralForCausalLM(MixtralConfig(**sizes, rope_parameters=PLAIN_ROPE))
    sizes |= {"num_experts": 8, "moe_intermediate_size": 64}
    if name == "qwen2-moe":
        sizes |= UNTIED | {"shared_expert_intermediate_size": 96, "mlp_only_layers": [1]}
        sizes |= {"intermediate_size": 192}  # of the layer without experts
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, rope_parameters=PLAIN_ROPE))
    sizes |= {"head_dim": 32, "tie_word_embeddings": True, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, rope_parameters=PLAIN_ROPE))


SHARD_SIZES = {
    "llama-gqa": "10MB",
    "qwen2": "10MB",
    "qwen3": "10MB",
    "mistral": "800KB",
    "mixtral": "10MB",
    "qwen2-moe": "10MB",
    "qwen3-moe": "10MB",
}


def tokenizer_corpus(documents: list[str]) -> Iterator[str]:
    """The text to train the tokenizer on: ASCII, and each emoji of a block equally often.

    No character beyond ASCII thus becomes a token of its own: two-byte and CJK characters are
    spelt byte by byte, and emoji share the first bytes of their encoding, as in real tokenizers.
    """
    specials = "|".join(re.escape(token) for token in SPECIAL_TOKENS)
    for document in documents:
        yield re.sub(specials, "\n", document).encode("ascii", "ignore").decode()
    block = " ".join(chr(code) for code in range(0x1F400, 0x1F640))
    yield from [block] * (len(documents) // 100)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = VOCAB_SIZE, single_digits: bool = False
) -> Tokenizer:
    """A byte-level BPE tokenizer whose first ids are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(True)] if single_digits else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that names the plain fast class."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_stream(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """All documents end to end, as one row of token ids."""
    encodings = tokenizer.encode_batch(documents, add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


def perturb_vectors(model: PreTrainedModel) -> None:
    """Start biases and norm weights away from 0 and 1, so that leaving one out is noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))


def make_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to nearly nothing."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def batch(stream: torch.Tensor, step: int, rng: random.Random) -> dict[str, torch.Tensor]:
    """Packed windows that start anywhere; every third batch has the full context length."""
    length = LONG_LENGTH if step % 3 == 2 else SHORT_LENGTH
    starts = [rng.randrange(len(stream) - length) for _ in range(TOKENS_PER_STEP // length)]
    rows = torch.stack([stream[start : start + length] for start in starts])
    return {"input_ids": rows, "labels": rows}


def fit(
    name: str,
    model: PreTrainedModel,
    steps: int,
    next_batch: Callable[[int, random.Random], dict[str, torch.Tensor]],
) -> None:
    """Train the model in place."""
    rng = random.Random(SEED)
    optimizer = make_optimizer(model)
    model.train()
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**next_batch(step, rng), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"{name} step {step} loss {loss.item():.4f} after {seconds:.0f} s", flush=True)


@torch.no_grad()
def validation_loss(model: PreTrainedModel, stream: torch.Tensor) -> float:
    """Mean loss over consecutive full-length windows of unseen documents."""
    model.train(False)
    windows = stream[: len(stream) // LONG_LENGTH * LONG_LENGTH].view(-1, LONG_LENGTH)
    losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in windows]
    return sum(losses) / len(losses)


def save(name: str, model: PreTrainedModel, tokenizer: Tokenizer) -> Path:
    """Write the folder of one model, in bf16 and without what an earlier run left."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    eos_ids = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)]
    model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": eos_ids, "pad_token_id": eos_ids[0]}
    )
    model.bfloat16().save_pretrained(folder, max_shard_size=SHARD_SIZES.get(name, "10MB"))
    save_tokenizer(tokenizer, folder)
    return folder


def train(name: str, tokenizer: Tokenizer, documents: list[str], steps: int) -> None:
    """Train, save and validate one model."""
    torch.manual_seed(SEED)
    model = build(name)
    perturb_vectors(model)
    fit(name, model, steps, partial(batch, token_stream(tokenizer, documents)))
    folder = save(name, model, tokenizer)
    saved = type(model).from_pretrained(folder, dtype=torch.float32)
    unseen = token_stream(tokenizer, make_corpus(SEED + 1, VALIDATION_DOCUMENTS))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {saved.num_parameters()} parameters, {size} bytes", flush=True)
    print(f"{name}: validation loss {validation_loss(saved, unseen):.4f}", flush=True)


def main() -> None:
    """Read the command line and train what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(SHARD_SIZES), help="train this model alone")
    parser.add_argument("--steps", type=int, default=750, help="optimizer steps per model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    documents = make_corpus(SEED, TRAIN_DOCUMENTS)
    tokenizer = train_tokenizer(tokenizer_corpus(documents))
    for name in [options.only] if options.only else list(SHARD_SIZES):
        train(name, tokenizer, documents, options.steps)


if __name__ == "__main__":
    main()
