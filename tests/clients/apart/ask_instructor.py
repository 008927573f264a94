"""python ask_instructor.py BASE_URL MODEL MODE CLASS TEXT MAX_TOKENS: prints the object as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import instructor
import openai

sys.path.append(str(Path(__file__).parents[1]))
import weather

base_url, model, mode, wanted, text, max_tokens = sys.argv[1:]
with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as plain:
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    found = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0,
        response_model=getattr(weather, wanted), max_retries=0, max_tokens=int(max_tokens),
    )  # fmt: skip
print(found.model_dump_json())
