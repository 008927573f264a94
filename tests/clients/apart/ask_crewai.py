"""python ask_crewai.py BASE_URL MODEL QUESTION: prints the answer of CrewAI's LLM, with a tool."""

from __future__ import annotations

import sys
from pathlib import Path

from crewai import LLM

sys.path.append(str(Path(__file__).parents[1]))
import weather

base_url, model, question = sys.argv[1:]
llm = LLM(model=f"openai/{model}", base_url=base_url, api_key="none", temperature=0)
city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
given = {"tools": [tool], "available_functions": {"get_weather": weather.get_weather}}
print(llm.call([{"role": "user", "content": question}], **given))
