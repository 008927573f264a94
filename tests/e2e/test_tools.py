"""A model that calls tools, through a real cluster and the `openai` package: nothing is played."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from warm import WarmCluster

MODEL = "tool-caller"
WEATHER = {"Oslo": "snowy, 3 degrees", "Cairo": "sunny, 33 degrees"}
ASK = {"role": "user", "content": "What is the weather in Oslo and in Cairo?"}
ANSWER = "It is snowy, 3 degrees in Oslo and sunny, 33 degrees in Cairo."


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


NO_THOUGHT = {"510": -100}
GET_WEATHER = tool("get_weather", city="string")
ADD = tool("add", a="integer", b="integer")


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """Without flags: its template shows how the model writes calls and thoughts."""
    with WarmCluster(MODEL) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.fixture(scope="module")
def client(cluster: WarmCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], stream: bool = False, **options: Any) -> Any:
    """The completion, by OpenAI's own assembly of it if streamed."""
    options = {"model": MODEL, "messages": messages, "temperature": 0, **options}
    if not stream:
        return client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as events:
        return events.get_final_completion()


def test_the_same_loop_over_grpc(cluster: WarmCluster) -> None:
    parameters = json.dumps(GET_WEATHER["function"]["parameters"])
    tools = [pb.Tool(name="get_weather", parameters=parameters)]
    messages = [pb.Message(role="user", content=ASK["content"])]

    def said(stub: pb_grpc.InferenceStub) -> tuple[str, dict[int, pb.ToolCall], set[int]]:
        chat = pb.Chat(messages=messages, tools=tools)
        request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(temperature=0))
        text, calls, reasons = "", {}, set()
        for response in stub.Generate(request, timeout=120):
            text += response.text
            reasons.add(response.finish_reason)
            for call in response.tool_calls:
                known = calls.setdefault(call.index, pb.ToolCall(index=call.index))
                known.id += call.id
                known.name += call.name
                known.arguments += call.arguments
        return text, calls, reasons - {pb.FINISH_REASON_UNSPECIFIED}

    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        _, calls, reasons = said(stub)
        assert reasons == {pb.FINISH_REASON_TOOL_CALLS} and list(calls) == [0, 1]
        messages.append(pb.Message(role="assistant", tool_calls=calls.values()))
        for call in calls.values():
            assert call.name == "get_weather" and call.id
            content = WEATHER[json.loads(call.arguments)["city"]]
            messages.append(pb.Message(role="tool", tool_call_id=call.id, content=content))
        assert said(stub) == (ANSWER, {}, {pb.FINISH_REASON_STOP})


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_that_calls_and_answers(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [ASK]
    tools = [ADD, GET_WEATHER]
    completion = ask(client, messages, stream, tools=tools, n=2, logprobs=True)
    first, second = completion.choices
    assert first.finish_reason == second.finish_reason == "tool_calls"
    assert first.message.content in (None, "") and first.logprobs.content
    calls, others = first.message.tool_calls, second.message.tool_calls
    assert [call.function for call in calls] == [call.function for call in others]
    assert len({call.id for call in [*calls, *others]}) == 4
    messages.append(first.message)
    for call in calls:
        assert call.function.name == "get_weather"
        content = WEATHER[json.loads(call.function.arguments)["city"]]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    (choice,) = ask(client, messages, stream, tools=tools).choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert not choice.message.tool_calls


def test_only_tools_that_are_there_are_called(client: openai.OpenAI) -> None:
    for tools in ([], [ADD]):
        (choice,) = ask(client, [ASK], tools=tools).choices
        assert choice.message.content == "I do not know."
    (choice,) = ask(client, [ASK], tools=[GET_WEATHER], parallel_tool_calls=False).choices
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Oslo"}']


def test_a_thought_comes_before_the_call(client: openai.OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    for stream in (False, True):
        (choice,) = ask(client, [ASK], stream, tools=[GET_WEATHER], extra_body=thinking).choices
        thought = "The user asks for the weather in Oslo and in Cairo."
        assert choice.message.reasoning_content == thought
        assert len(choice.message.tool_calls) == 2 and not choice.message.content
    (choice,) = ask(client, [ASK], tools=[ADD], extra_body=thinking).choices
    assert choice.message.content == "I do not know."
    (choice,) = ask(client, [ASK], tools=[ADD], extra_body=thinking, max_tokens=4).choices
    assert choice.finish_reason == "length" and choice.message.content is None
    assert thought.startswith(choice.message.reasoning_content)


JSON = {
    "type": "object",
    "properties": {"answer": {"enum": ["nothing", "snow"]}},
    "required": ["answer"], "additionalProperties": False,
}  # fmt: skip
AS_JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": JSON}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_free_and_the_answer_after_it_is_not(
    client: openai.OpenAI, stream: bool
) -> None:
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    (free,) = ask(client, [ASK], **thinking).choices
    asked = {**thinking, "response_format": AS_JSON, "logprobs": True}
    (choice,) = ask(client, [ASK], stream, **asked).choices
    assert choice.message.reasoning_content == free.message.reasoning_content
    assert json.loads(choice.message.content)["answer"] in ("nothing", "snow")
    (cut,) = ask(client, [ASK], **asked, max_tokens=4).choices
    assert cut.finish_reason == "length" and not cut.message.content
    # Calls that are insisted on go before what a text would have to be.
    required = {"tools": [GET_WEATHER], "tool_choice": "required"}
    (choice,) = ask(client, [ASK], stream, **asked, **required).choices
    assert choice.message.reasoning_content and not choice.message.content
    calls = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]
    assert calls and set(calls) <= set(WEATHER)


@pytest.mark.parametrize("think", [False, True])
def test_under_auto_an_answer_is_calls_or_keeps_to_its_schema(
    client: openai.OpenAI, think: bool
) -> None:
    asked = {
        "response_format": AS_JSON,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": think}},
    }
    (choice,) = ask(client, [ASK], tools=[GET_WEATHER], **asked).choices
    assert len(choice.message.tool_calls) == 2 and choice.finish_reason == "tool_calls"
    asked["logit_bias"] = {"508": -100}  # calls
    (choice,) = ask(client, [ASK], stream=True, tools=[ADD], **asked).choices
    assert json.loads(choice.message.content)["answer"] in ("nothing", "snow")
    assert not choice.message.tool_calls and choice.finish_reason == "stop"


def test_calls_without_a_token_of_their_own_are_told_from_a_text_by_their_schema() -> None:
    schema = {"type": "object", "properties": {"answer": {"$ref": "#/$defs/a"}}} | {
        "required": ["answer"], "additionalProperties": False,
        "$defs": {"a": {"enum": ["nothing", "snow"]}},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    with WarmCluster(MODEL, router={"tool_call_parser": "llama3_json"}) as cluster:
        url = f"{cluster.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for stream in (False, True):
                asked = {"stream": stream, "tools": [GET_WEATHER], "response_format": form}
                (choice,) = ask(client, [ASK], **asked, logit_bias={"67": -100}).choices  # "a"
                (call,) = choice.message.tool_calls
                assert json.loads(call.function.arguments)["city"] in WEATHER
                assert choice.finish_reason == "tool_calls" and not choice.message.content
                (choice,) = ask(client, [ASK], **asked, logit_bias={"316": -100}).choices  # "name"
                assert json.loads(choice.message.content)["answer"] in ("nothing", "snow")
                assert not choice.message.tool_calls and choice.finish_reason == "stop"
        cluster.wait_idle()


def test_a_large_body_is_the_same(client: openai.OpenAI) -> None:
    """Above 64 KiB another process prepares it."""
    described = GET_WEATHER["function"] | {"description": "x" * 100_000}
    large = {"type": "function", "function": described}
    (choice,) = ask(client, [ASK], tools=[large]).choices
    assert len(choice.message.tool_calls) == 2


REPORT = tool("report", city="string", degrees="integer")
REPORT["function"]["parameters"]["$defs"] = {"city": {"enum": ["Oslo", "Cairo"]}}
REPORT["function"]["parameters"]["properties"]["city"] = {"$ref": "#/$defs/city"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_always_parses(client: openai.OpenAI, stream: bool) -> None:
    """Even of a model that draws wildly, and tools it has never seen."""
    options = {"temperature": 2.0, "seed": 7, "n": 3, "max_tokens": 400, "logit_bias": NO_THOUGHT}
    tools = [ADD, REPORT]
    given = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    for choice in ask(client, [ASK], stream, **given, **options).choices:
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        kinds = {"add": {"a": int, "b": int}, "report": {"city": str, "degrees": int}}
        assert {key: type(value) for key, value in arguments.items()} == kinds[call.function.name]
        assert arguments.get("city", "Oslo") in WEATHER
        assert choice.finish_reason == "tool_calls" and not choice.message.content


def test_required_may_be_several(client: openai.OpenAI) -> None:
    given = {"tools": [GET_WEATHER, ADD], "logit_bias": NO_THOUGHT}
    (choice,) = ask(client, [ASK], tool_choice="required", **given).choices
    calls = [call.function for call in choice.message.tool_calls]
    assert [json.loads(call.arguments)["city"] for call in calls] == list(WEATHER)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool(client: openai.OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "report"}}
    given = {"tools": [ADD, REPORT], "tool_choice": named, "logprobs": True}
    (choice,) = ask(client, [ASK], stream, **given).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "report" and choice.finish_reason == "stop"
    assert set(json.loads(call.function.arguments)) == {"city", "degrees"}
    (cut,) = ask(client, [ASK], **given, max_tokens=3, logit_bias=NO_THOUGHT).choices
    assert cut.finish_reason == "length" and cut.message.tool_calls


def test_a_tool_whose_schema_is_none(client: openai.OpenAI) -> None:
    odd = tool("odd", x="number-ish")
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, [ASK], tools=[odd], tool_choice="required")
    assert error.value.param == "tools"
