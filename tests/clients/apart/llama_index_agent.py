"""python llama_index_agent.py BASE_URL MODEL: what LlamaIndex makes of questions, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

sys.path.append(str(Path(__file__).parents[1]))
from weather import NEWS, QUESTION, Weather, get_weather

base_url, name = sys.argv[1:]


def model(**options: bool) -> OpenAILike:
    return OpenAILike(
        model=name, api_base=base_url, api_key="none", temperature=0, max_retries=0,
        is_chat_model=True, is_function_calling_model=True, context_window=1024, **options,
    )  # fmt: skip


async def agent() -> str:
    return str(await FunctionAgent(tools=[get_weather], llm=model()).run(QUESTION))


asked = [ChatMessage(role="user", content="Hello")]
news = PromptTemplate("{news}")
print(
    json.dumps(
        {
            "agent": asyncio.run(agent()),
            "chat": model().chat(asked).message.content,
            "streamed": "".join(piece.delta or "" for piece in model().stream_chat(asked)),
            "by_tool": model().structured_predict(Weather, news, news=NEWS).model_dump(),
            "by_schema": model(should_use_structured_outputs=True)
            .structured_predict(Weather, news, news=NEWS)
            .model_dump(),
        }
    )
)
