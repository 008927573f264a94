"""Answers the prompts of a JSONL file: each line `{"prompt": …}` or `{"messages": […]}`.

    python examples/batch_jsonl.py prompts.jsonl answers.jsonl --model /models/Qwen3-8B

Writes each line again with its `answer`, in order. For files in OpenAI's batch format, and runs
that can be interrupted, there is `pdserve run-batch`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pdserve import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()

    rows = [json.loads(line) for line in args.input.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0)
    chats = [row for row in rows if "messages" in row]
    texts = [row for row in rows if "messages" not in row]
    with LLM(model=args.model) as llm:
        outputs = llm.chat([row["messages"] for row in chats], params)
        outputs += llm.generate([row["prompt"] for row in texts], params)
    for row, output in zip([*chats, *texts], outputs, strict=True):
        row["answer"] = output.outputs[0].text
    with args.output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main()
