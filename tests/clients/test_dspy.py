"""DSPy: a signature with types, whose answer is JSON of a schema."""

from __future__ import annotations

from typing import Any, Literal

import dspy

from conftest import Server


class Model(dspy.LM):
    """DSPy holds a model that it does not know for one without schemas."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})


class Extract(dspy.Signature):
    """The weather in the news."""

    news: str = dspy.InputField()
    sky: Literal["sunny", "foggy"] = dspy.OutputField()
    degrees: int = dspy.OutputField()


def model(server: Server, max_tokens: int) -> Any:
    return Model(
        f"openai/{server.model}", api_base=server.base_url, api_key="none", temperature=0,
        max_tokens=max_tokens, cache=False, num_retries=0,
    )  # fmt: skip


def test_a_signature(tool_server: Server) -> None:
    with dspy.context(lm=model(tool_server, 100), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Extract)(news="foggy, 17 degrees")
    assert found.sky in ("sunny", "foggy") and isinstance(found.degrees, int)


def test_text(server: Server) -> None:
    asked = model(server, 12)
    (text,) = asked("Write about a dog.")
    assert text == asked("Write about a dog.")[0] != ""
    assert asked.history[-1]["usage"]["completion_tokens"] == 12
