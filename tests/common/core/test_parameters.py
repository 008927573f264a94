"""The table of request parameters, and what must agree with it: SamplingParams, the protobuf
message, the bodies of requests and the pages."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from pydantic import ValidationError

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import PARAMETERS, Parameter, ParamType
from pdserve.common.core.sampling import SAMPLING_PARAMETERS, SamplingParams, check_sampling
from pdserve.common.rpc.convert import fields_set, sampling_from_pb, sampling_to_pb
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.router.api.schema import ChatBody, CompletionBody, GenerationBody

VOCAB = 512
WIRE = pb.SamplingParams.DESCRIPTOR
CARRIED = [each for each in PARAMETERS.values() if each.number is not None]
# One value of each kind that every parameter of it takes, and one that none does.
SAMPLES: dict[ParamType, tuple[Any, Any]] = {
    ParamType.INTEGER: (1, "one"),
    ParamType.NUMBER: (0.5, True),
    ParamType.BOOLEAN: (True, 1),
    ParamType.TEXT: ("x", 1),
    ParamType.TEXT_OR_TEXTS: (["x"], [1]),
    ParamType.TEXTS: (["x"], "x"),
    ParamType.TOKEN_IDS: ([3, 4], ["3"]),
    ParamType.TOKEN_ID_LISTS: ([[3], [4, 5]], [3]),
    ParamType.BIASES: ({"3": 0.5}, [3]),
    ParamType.OBJECT: ({}, []),
    ParamType.OBJECT_OR_TEXT: ("x", 1),
}


def name_of(parameter: Parameter) -> str:
    return parameter.name


# ---- SamplingParams -----------------------------------------------------------------------------


def test_every_sampling_parameter_has_a_row() -> None:
    assert [each.name for each in SAMPLING_PARAMETERS] == [f.name for f in fields(SamplingParams)]
    assert all(each.number is not None for each in SAMPLING_PARAMETERS), "nodes must be told"
    check_sampling(SamplingParams(), VOCAB)


@pytest.mark.parametrize("parameter", SAMPLING_PARAMETERS, ids=name_of)
def test_nodes_check_every_bound(parameter: Parameter) -> None:
    for bad in out_of_range(parameter):
        with pytest.raises(InvalidRequest) as caught:
            check_sampling(replace(SamplingParams(), **{parameter.name: bad}), VOCAB)
        assert caught.value.param == parameter.name


def out_of_range(parameter: Parameter) -> list[Any]:
    bounds = [parameter.low, parameter.high]
    numbers = [] if None in bounds else [parameter.low - 1, parameter.high + 1]  # type: ignore[operator]
    numbers += [0] if parameter.positive else []
    match parameter.kind:
        case ParamType.INTEGER | ParamType.NUMBER:
            assert numbers, "a number without bounds"
            return numbers
        case ParamType.TOKEN_IDS:
            return [(VOCAB,), (-1,), (1,) * (parameter.most + 1)]
        case ParamType.BIASES:
            many = dict.fromkeys(range(parameter.most + 1), 0.0)
            return [{VOCAB: 0.0}, {-1: 0.0}, many, *({1: float(n)} for n in numbers)]
        case ParamType.TOKEN_ID_LISTS:
            long = (1,) * (parameter.longest + 1)
            return [((VOCAB,),), ((1,), (-1,)), ((),), (long,), ((1,),) * (parameter.most + 1)]
        case ParamType.TEXT:
            return ["x" * (parameter.longest + 1)]
        case _:
            return []


# ---- protobuf -----------------------------------------------------------------------------------


def test_the_message_has_the_fields_of_the_table() -> None:
    assert {f.name: f.number for f in WIRE.fields} == {p.name: p.number for p in CARRIED}


FULL = SamplingParams(
    max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=2**63 - 1,
    presence_penalty=-1.5, frequency_penalty=1.5, repetition_penalty=2.0, ignore_eos=True,
    logit_bias={3: -1.5, 4: 100.0}, stop_token_ids=(5, 6), allowed_token_ids=(7,), logprobs=0,
    prompt_logprobs=4, bad_words_token_ids=((8,), (9, 10)), grammar='start: "a"',
)  # fmt: skip


def test_nodes_are_told_every_parameter() -> None:
    unlike = [
        f.name for f in fields(FULL) if getattr(FULL, f.name) != getattr(SamplingParams(), f.name)
    ]
    assert unlike == [f.name for f in fields(FULL)], "FULL differs from the defaults everywhere"
    for params in (FULL, SamplingParams(), replace(FULL, logprobs=None)):
        message = pb.SamplingParams.FromString(sampling_to_pb(params).SerializeToString())
        assert sampling_from_pb(message) == params


def test_set_and_unset_parameters_are_distinguished() -> None:
    assert fields_set(pb.SamplingParams()) == {}
    assert fields_set(pb.SamplingParams(temperature=0, n=0)) == {"temperature": 0, "n": 0}


# ---- HTTP ---------------------------------------------------------------------------------------


def test_a_body_has_the_fields_of_the_table() -> None:
    shared = {each.name for each in PARAMETERS.values() if each.http}
    of_a_stream = {"resumable", "resume"}  # what the router alone reads, on its way to a client
    assert set(GenerationBody.model_fields) == shared | of_a_stream
    for body in (CompletionBody, ChatBody):
        assert set(body.model_fields) >= shared


@pytest.mark.parametrize(
    "parameter", [each for each in PARAMETERS.values() if each.http], ids=name_of
)
def test_a_body_takes_values_of_the_rows_kind(parameter: Parameter) -> None:
    good, foreign = SAMPLES[parameter.kind]
    for value in (None, good):
        body = GenerationBody(**{parameter.name: value})
        assert value is None or getattr(body, parameter.name) is not None
    with pytest.raises(ValidationError) as caught:
        GenerationBody(**{parameter.name: foreign})
    assert caught.value.errors()[0]["loc"][0] == parameter.name
