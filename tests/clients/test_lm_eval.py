"""lm-eval: its log-likelihoods, and what greedy search would say, are those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import MODELS, Server, beside_pdserve

TIMEOUT = 600  # seconds
QUESTIONS = [
    {"text": "", "choices": ["Once upon a time", " the dog"]},
    {
        "text": "Once upon a time",
        "choices": [" there was a little dog", ", the", " there", " zebra 7!"],
    },
    {"text": "The dog ran to the ", "choices": ["house. The cat was happy.", "garden", "q"]},
]
TEXTS = [{"text": "Once upon a time there was a cat."}, {"text": "The bird sang. " * 8}]
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "choices": (QUESTIONS, {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "target_delimiter": "",
        "doc_to_choice": "{{choices}}", "doc_to_target": 0, "metric_list": [{"metric": "acc"}],
    }),
    "rolling": (TEXTS, {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }),
}  # fmt: skip
# Runs where pdserve is installed, for there is torch: [context, continuation] → its log-likelihood
# and whether greedy search would have said it.
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
for context, continuation in json.load(sys.stdin):
    words = context.rstrip()  # spaces between them are the continuation's
    context, continuation = words, context[len(words) :] + continuation
    start = len(tokenizer(context).input_ids) if context else 0
    tokens = tokenizer(context + continuation).input_ids
    if not context:
        start, tokens = 1, [tokenizer.eos_token_id, *tokens]
    with torch.inference_mode():
        rows = model(torch.tensor([tokens])).logits[0, start - 1 : -1].log_softmax(-1)
    said = torch.tensor(tokens[start:])
    own = rows.gather(1, said[:, None]).sum().item()
    print(json.dumps([own, bool((rows.argmax(-1) == said).all())]))
"""


def reference(server: Server, pairs: Sequence[Sequence[str]]) -> list[list[Any]]:
    command = [beside_pdserve("python"), "-c", REFERENCE, MODELS / server.model]
    done = subprocess.run(
        command, input=json.dumps(pairs), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_tasks(folder: Path) -> None:
    """JSON is YAML."""
    folder.mkdir()
    for name, (documents, config) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(each)}\n" for each in documents))
        config = {
            "task": name, "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(data)}}, **config,
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(config))


def evaluate(server: Server, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns what lm-eval has asked and heard, by task."""
    write_tasks(tasks := folder / "tasks")
    given = {
        "model": server.model, "base_url": f"{server.base_url}/completions",
        "tokenizer": MODELS / server.model, "tokenizer_backend": "huggingface",
        "num_concurrent": 2, "max_retries": 1, "max_length": 1024,
    }  # fmt: skip
    command = [
        *(str(Path(sys.executable).with_name("lm_eval")), "--model", "local-completions"),
        *("--model_args", ",".join(f"{key}={value}" for key, value in given.items())),
        *("--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", "3"),
        *("--output_path", str(folder / "out"), "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found = {}
    for name in TASKS:
        (file,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


@pytest.mark.timeout(3 * TIMEOUT)
def test_log_likelihoods_are_those_of_transformers(server: Server, tmp_path: Path) -> None:
    samples = evaluate(server, tmp_path)
    pairs, told = [], []
    for sample in samples["choices"]:
        pairs += [(each["arg_0"], each["arg_1"]) for each in sample["arguments"].values()]
        told += [(float(value), flag == "True") for ((value, flag),) in sample["resps"]]
    assert len(pairs) == sum(len(each["choices"]) for each in QUESTIONS)
    right = reference(server, pairs)
    assert [value for value, _ in told] == pytest.approx([value for value, _ in right], abs=1e-3)
    assert [greedy for _, greedy in told] == [greedy for _, greedy in right]
    assert {greedy for _, greedy in told} == {True, False}

    rolling = [float(value) for sample in samples["rolling"] for (value,) in sample["resps"]]
    right = reference(server, [("", each["text"]) for each in TEXTS])
    assert rolling == pytest.approx([value for value, _ in right], abs=1e-3)
