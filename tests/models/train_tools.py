"""Train `tool-caller`, the tiny checkpoint that calls tools.

    python tests/models/train_tools.py [--steps N]

About five minutes on one core. Everything is seeded.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from story_grammar import IM_END, IM_START
from tool_dialogues import (
    CHAT_TEMPLATE,
    END_OF_THINK,
    END_OF_TOOL_CALL,
    THINK,
    TOOL_CALL,
    make_dialogues,
)
from train import (
    PLAIN_ROPE,
    SEED,
    SIZES,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    fit,
    perturb_vectors,
    save,
    train_tokenizer,
)

NAME = "tool-caller"
DIALOGUES, DOCUMENTS_PER_STEP = 12000, 24
IGNORED = -100  # a label that counts for nothing
# Text to a reader, as in Qwen's tokenizers: each is a token, and none is special.
MARKERS = (TOOL_CALL, END_OF_TOOL_CALL, THINK, END_OF_THINK)


def make_tokenizer(documents: list[str]) -> Tokenizer:
    """Every digit is a token, so that numbers can be copied, and so is each marker."""
    added = "|".join(map(re.escape, (*SPECIAL_TOKENS, *MARKERS)))
    texts = (re.sub(added, "\n", text) for text in documents)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE - len(MARKERS), single_digits=True)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKERS])
    return tokenizer


@dataclass(frozen=True)
class Rows:
    """Documents, one a row, filled up with ends of text; the shortest first. None is read after
    another, whose tools would be taken for its own. Only what the assistant says is learnt."""

    ids: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, documents: list[str]) -> Rows:
        encodings = tokenizer.encode_batch(documents, add_special_tokens=False)
        head = tokenizer.encode(f"{IM_START}assistant\n").ids
        end = tokenizer.token_to_id(IM_END)
        rows = sorted((encoding.ids for encoding in encodings), key=len)
        return cls(
            _padded(rows, 0), _padded([_assistants(row, head, end) for row in rows], IGNORED)
        )

    def batch(self, step: int, rng: random.Random) -> dict[str, torch.Tensor]:
        """Documents of about the same length."""
        start = rng.randrange(len(self.ids) - DOCUMENTS_PER_STEP)
        chosen = slice(start, start + DOCUMENTS_PER_STEP)
        longest = int((self.ids[chosen] != 0).sum(1).max()) + 1
        ids, labels = self.ids[chosen, :longest], self.labels[chosen, :longest]
        return {"input_ids": ids, "labels": labels}


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def _assistants(row: list[int], head: list[int], end: int) -> list[int]:
    """The tokens of the assistant's turns with their ends; in the place of others IGNORED."""
    labels, inside = [], False
    for place, token in enumerate(row):
        labels.append(token if inside else IGNORED)
        inside = inside and token != end
        inside = inside or row[place + 1 - len(head) : place + 1] == head
    return labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2400, help="optimizer steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    documents = make_dialogues(SEED, DIALOGUES)
    tokenizer = make_tokenizer(documents)
    torch.manual_seed(SEED)
    sizes = SIZES | {
        "hidden_size": 96,
        "head_dim": 32,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters=PLAIN_ROPE))
    perturb_vectors(model)
    fit(NAME, model, options.steps, Rows.of(tokenizer, documents).batch)
    folder = save(NAME, model, tokenizer)
    config = folder / "tokenizer_config.json"
    changed = {"chat_template": CHAT_TEMPLATE, "model_max_length": 2048}
    config.write_text(json.dumps(json.loads(config.read_text()) | changed, indent=2) + "\n")
    saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    unseen = Rows.of(tokenizer, make_dialogues(SEED + 1, 300))
    with torch.no_grad():
        loss = float(saved(input_ids=unseen.ids, labels=unseen.labels).loss)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{NAME}: {saved.num_parameters()} parameters, {size} bytes", flush=True)
    print(f"{NAME}: validation loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
