"""Shows the features of the gRPC service `Inference`.

    python examples/grpc_client.py HOST:PORT [--api-key KEY]

Needs `grpcio`, `grpcio-status` and the messages of proto/inference.proto, here pdserve's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc

TIMEOUT = 60.0  # seconds: the deadline of a call, on all nodes
STORY = "Once upon a time there was a girl named Lily. She lived in"
SCHEMA = """{"type": "object", "properties": {"name": {"enum": ["Lily", "Tom"]},
"age": {"type": "integer", "minimum": 1, "maximum": 99}},
"required": ["name", "age"], "additionalProperties": false}"""
CITY = """{"type": "object", "properties": {"city": {"enum": ["Oslo", "Cairo"]}},
"required": ["city"], "additionalProperties": false}"""


class Client:
    """One channel, for any number of calls at a time."""

    def __init__(self, channel: grpc.Channel, api_key: str | None = None) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []

    def model(self) -> pb.GetModelResponse:
        return self._stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT, metadata=self._metadata)

    def generate(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        """Streams the responses. To stop early, `cancel` the call, which ends it on all nodes."""
        return self._stub.Generate(request, timeout=TIMEOUT, metadata=self._metadata)


def text(client: Client) -> None:
    """Streams text; the last response has usage and timeline."""
    sampling = pb.SamplingParams(max_tokens=20, temperature=0, logit_bias={0: -100})
    for response in client.generate(
        pb.GenerateRequest(text=STORY, sampling=sampling, timeline=True)
    ):
        print(response.text, end="", flush=True)
    print(f"\n  {response.usage.completion_tokens} tokens")
    for stage in response.timeline.stages:
        print(f"  {1e3 * stage.seconds:8.2f} ms  {stage.name} on {stage.node}")


def structured(client: Client) -> None:
    constraint = pb.StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    sampling = pb.SamplingParams(max_tokens=60, seed=1, structured_outputs=constraint)
    request = pb.GenerateRequest(text=STORY, sampling=sampling)
    print("".join(response.text for response in client.generate(request)))


def scored(client: Client) -> None:
    """Scores the tokens of a prompt; also shows bad words and a cache salt."""
    request = pb.GenerateRequest(
        text=STORY,
        cache_salt="tenant-1",
        return_token_ids=True,
        sampling=pb.SamplingParams(max_tokens=1, prompt_logprobs=1, bad_words=["castle"]),
    )
    ids: list[int] = []
    tokens: list[pb.Token] = []
    for response in client.generate(request):
        ids += response.prompt_token_ids
        tokens += response.prompt_logprobs
    assert [token.id for token in tokens] == ids
    total = sum(token.logprob for token in tokens[1:])
    first = sum(token.rank == 1 for token in tokens[1:])
    print(f"{len(ids)} tokens, log-probability {total:.1f}, {first} of them the likeliest")


def called(client: Client) -> None:
    """A chat that must call a tool. A call is streamed in pieces, like text."""
    chat = pb.Chat(
        messages=[pb.Message(role="user", content="What is the weather in Oslo?")],
        tools=[pb.Tool(name="get_weather", parameters=CITY)],
        tool="get_weather",
    )
    arguments = ""
    request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(temperature=0))
    for response in client.generate(request):
        for call in response.tool_calls:
            arguments += call.arguments
            if call.name:
                print(f"{call.name}: ", end="")
    print(arguments)


def refused(client: Client) -> None:
    """Shows the google.rpc details of an error."""
    request = pb.GenerateRequest(text=STORY, sampling=pb.SamplingParams(top_p=2))
    try:
        list(client.generate(request))
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}")
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        for detail in status.details if status else ():
            info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
            if detail.Unpack(info):
                print(f"  {info.domain}: {info.reason}")
            if detail.Unpack(bad):
                print(f"  field: {bad.field_violations[0].field}")
            if detail.Unpack(retry):
                print(f"  again in {retry.retry_delay.ToTimedelta()}")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Shows what gRPC can do.")
    parser.add_argument("address", help="HOST:PORT, the router's --grpc-port")
    parser.add_argument("--api-key")
    given = parser.parse_args(args)
    with grpc.insecure_channel(given.address) as channel:
        client = Client(channel, given.api_key)
        model = client.model()
        print(f"{model.id}: {model.max_model_len} tokens")
        for show in (text, structured, scored, called, refused):
            print(f"\n{show.__name__}")
            show(client)


if __name__ == "__main__":
    main()
