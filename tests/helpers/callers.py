"""Clients that disconnect without waiting for the answer."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from typing import Any, Protocol

import grpc

from cluster import Cluster
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc

_numbers = itertools.count()


class Caller(Protocol):
    def hang_up(self) -> None:
        """Disconnects."""


def fresh_prompt(num_tokens: int) -> list[int]:
    """Returns a prompt that shares no block with another one."""
    first, second = divmod(next(_numbers), 400)
    return [first + 3, second + 3, *(3 + i * i % 500 for i in range(num_tokens - 2))]


class HTTPCaller:
    """Uses a raw socket, so that hanging up only closes the connection."""

    def __init__(self, cluster: Cluster, prompt: list[int], max_tokens: int, stream: bool) -> None:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        )
        self._socket = socket.create_connection(("127.0.0.1", cluster.ports["http"]), timeout=60)
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )

    def hang_up(self) -> None:
        self._socket.close()


class GRPCCaller:
    def __init__(self, cluster: Cluster, prompt: list[int], max_tokens: int) -> None:
        self._channel = grpc.insecure_channel(cluster.grpc)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        self._call: Any = pb_grpc.InferenceStub(self._channel).Generate(request)

    def hang_up(self) -> None:
        self._call.cancel()
        self._channel.close()


KINDS = ("streamed", "whole", "grpc")


def call(cluster: Cluster, kind: str, num_prompt_tokens: int, max_tokens: int) -> Caller:
    prompt = fresh_prompt(num_prompt_tokens)
    if kind == "grpc":
        return GRPCCaller(cluster, prompt, max_tokens)
    return HTTPCaller(cluster, prompt, max_tokens, stream=kind == "streamed")


def storm(cluster: Cluster, count: int) -> None:
    """Makes calls of all kinds and lengths, and disconnects each at a random time."""
    rng = random.Random(count)
    callers: list[Caller] = []
    for _ in range(count):
        callers.append(call(cluster, rng.choice(KINDS), rng.randint(2, 500), rng.randint(1, 100)))
        time.sleep(rng.random() * 0.05)  # a random moment, not a wait
        if rng.random() < 0.7:
            callers.pop(rng.randrange(len(callers))).hang_up()
    for caller in callers:
        caller.hang_up()
