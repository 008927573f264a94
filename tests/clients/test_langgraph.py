"""LangGraph: an agent whose graph calls tools until the model has its answer."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from weather import ANSWER, FOUND, QUESTION, get_weather

from conftest import Server

ASKED: Any = {"messages": [("user", QUESTION)]}


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def agent(request: pytest.FixtureRequest, tool_server: Server) -> Any:
    model = ChatOpenAI(
        base_url=tool_server.base_url, api_key="none", model=tool_server.model, temperature=0,
        max_retries=0, stream_usage=True, use_responses_api=request.param,
    ).bind_tools([get_weather])  # fmt: skip

    def think(state: MessagesState) -> dict[str, list[BaseMessage]]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


def test_an_agent(agent: Any) -> None:
    _, calling, *results, last = agent.invoke(ASKED)["messages"]
    assert [call["args"]["city"] for call in calling.tool_calls] == list(FOUND)
    assert [result.content for result in results] == list(FOUND.values())
    assert isinstance(last, AIMessage) and last.text == ANSWER
    assert last.usage_metadata is not None and last.usage_metadata["output_tokens"] > 10


def test_an_agent_whose_tokens_are_streamed(agent: Any) -> None:
    streamed = [piece for piece, _ in agent.stream(ASKED, stream_mode="messages")]
    pieces = [piece.text for piece in streamed if isinstance(piece, AIMessageChunk) and piece.text]
    assert "".join(pieces) == ANSWER and len(pieces) > 5
    used = [piece.usage_metadata for piece in streamed if getattr(piece, "usage_metadata", None)]
    assert len(used) == 2, "each answer says once what it took"
