"""The HTTP API as clients use it, on a real cluster: the `openai` package, curl and requests."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

import reference
from cluster import text_of
from pdserve.router.http.request import TIMELINE_HEADER
from warm import WarmCluster

if TYPE_CHECKING:
    import openai

MODEL = "llama-gqa"
WINDOW = 1024
VOCABULARY = 512
END_OF_TEXT, IM_END = 0, 2
# The next words hold characters of two to four bytes: Noël 🐶, Zoë, noodles 🍜.
PET = (
    "Once upon a time there was a naïve girl named Zoë. She lived in an old mill near the woods "
    "with a dog named No"
)
STAR = "Day 1. Snow lay on every tree ❄. In the evening they sat near the market and"
BEDTIME = "Lily hugged Pip the frog and"  # " went to bed." and an end of text
CHAT = [{"role": "user", "content": "Please write about Zoë and the dog."}]
SHORT = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    with WarmCluster(MODEL) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.fixture(scope="module")
def client(cluster: WarmCluster) -> Iterator[openai.OpenAI]:
    import openai  # takes as long as many tests

    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(folder: Path, prompt: str, num_tokens: int) -> str:
    """The greedy continuation by the reference."""
    ids = tuple(reference.encode(folder, prompt))
    return reference.decode(folder, reference.greedy(folder, ids, num_tokens))


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


# ---- the openai client ----------------------------------------------------------------------


def test_openai_completion(cluster: WarmCluster, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PET, max_tokens=30, temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == expected(cluster.model, PET, 30)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    assert answer.usage.prompt_tokens == len(reference.encode(cluster.model, PET))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30


def test_openai_completion_stream(cluster: WarmCluster, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PET, max_tokens=30, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = stream
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert "".join(c.choices[0].text for c in chunks) == expected(cluster.model, PET, 30)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 30


def test_openai_chat_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": CHAT, "max_completion_tokens": 40, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content is not None
    assert message.content.startswith("Once upon a time")
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    streamed = [
        each
        for chunk in chunks[:-1]
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content or ()
    ]
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert [each.token for each in streamed] == [each.token for each in content]
    assert len(content) == 40
    assert b"".join(bytes(each.bytes or ()) for each in content).decode() == message.content
    assert all(len(each.top_logprobs) == 2 for each in content)


def test_openai_responses_are_chats(cluster: WarmCluster, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=24, temperature=0,  # type: ignore[arg-type]
    )  # fmt: skip
    options: dict[str, Any] = {"model": MODEL, "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(input=CHAT, **options)  # type: ignore[call-overload]
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 24)
    stream = client.responses.create(input=CHAT[0]["content"], **options, stream=True)
    *events, last = stream
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text == whole.output_text


def test_messages_are_chats(cluster: WarmCluster) -> None:
    options: dict[str, Any] = {"messages": CHAT, "max_tokens": 24, "temperature": 0}
    chat = cluster.post("/v1/chat/completions", **options).json()
    message = cluster.post("/v1/messages", **options).json()
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 24)
    count = cluster.post("/v1/messages/count_tokens", messages=CHAT).json()
    assert count == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_openai_n_choices_with_a_seed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "prompt": PET, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 24,
    }  # fmt: skip
    whole = [choice.text for choice in client.completions.create(**options).choices]
    assert whole[0] != whole[1]
    streamed = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == whole


def test_openai_models_and_errors(client: openai.OpenAI) -> None:
    import openai

    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "pdserve")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {WINDOW} tokens"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=WINDOW)


# ---- curl -----------------------------------------------------------------------------------


def curl(cluster: WarmCluster, path: str, *options: str) -> str:
    command = ["curl", "-sS", "--max-time", "60", *options, cluster.url + path]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def test_curl_completion(cluster: WarmCluster) -> None:
    body = json.dumps({"prompt": PET, "max_tokens": 8, "temperature": 0})
    answer = json.loads(
        curl(cluster, "/v1/completions", "-d", body, "-H", "Content-Type: application/json")
    )
    assert text(answer) == expected(cluster.model, PET, 8)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_curl_stream_framing(cluster: WarmCluster, path: str) -> None:
    prompt: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": PET}
    body = json.dumps({**prompt, "max_tokens": 20, "temperature": 0, "stream": True})
    output = curl(cluster, path, "-N", "-i", "--json", body)
    head, _, rest = output.partition("\r\n\r\n")
    assert "content-type: text/event-stream; charset=utf-8" in head.lower()
    assert "cache-control: no-cache" in head.lower()
    *events, last, end = rest.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    decoded = [json.loads(event[6:]) for event in events]
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    assert {event["object"] for event in decoded} == {kind}
    assert decoded[-1]["choices"][0]["finish_reason"] == "length"


# ---- text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PET, STAR])
def test_characters_of_several_bytes_are_never_split(cluster: WarmCluster, prompt: str) -> None:
    whole = text(cluster.complete(prompt, max_tokens=60))
    assert sum(len(character.encode()) > 1 for character in whole) >= 2
    pieces = [each["choices"][0]["text"] for each in cluster.stream(prompt, max_tokens=60)]
    assert "".join(pieces) == whole == expected(cluster.model, prompt, 60)
    assert not any("�" in piece for piece in pieces[:-1])


def test_a_stop_string_across_tokens(cluster: WarmCluster) -> None:
    whole = text(cluster.complete(PET, max_tokens=60))
    stop = whole[17:31]  # several tokens, from the middle of words
    before = whole[: whole.index(stop)]
    answer = cluster.complete(PET, max_tokens=60, stop=["never said", stop])
    assert text(answer) == before
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == stop
    assert answer["usage"]["completion_tokens"] < 60
    pieces = [each["choices"][0]["text"] for each in cluster.stream(PET, max_tokens=60, stop=stop)]
    assert "".join(pieces) == before
    included = cluster.complete(PET, max_tokens=60, stop=stop, include_stop_str_in_output=True)
    assert text(included) == before + stop


def test_a_stop_character_of_several_tokens(cluster: WarmCluster) -> None:
    answer = cluster.complete(PET, max_tokens=60, stop="🐶")
    assert text(answer) == expected(cluster.model, PET, 60).partition("🐶")[0]
    assert answer["choices"][0]["stop_reason"] == "🐶"


def test_echo_repeats_the_prompt(cluster: WarmCluster) -> None:
    answer = cluster.complete(PET, max_tokens=4, echo=True)
    assert text(answer) == PET + expected(cluster.model, PET, 4)
    assert text(cluster.complete(PET, max_tokens=0, echo=True)) == PET


def test_an_echo_has_logprobs(cluster: WarmCluster) -> None:
    """Evaluation harnesses ask so: batches of token ids, and what is read of the answer."""
    ids = tuple(reference.encode(cluster.model, PET))
    prompts = [ids, ids[:7], ids[3:]]
    options: dict[str, Any] = {"echo": True, "logprobs": 1}
    for _ in range(2):  # the second time there is a prefix cache, which knows no logits
        answer = cluster.complete(prompts, max_tokens=1, seed=1234, **options)
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            check_echo(cluster.model, prompt, choice["logprobs"], more=1)
            assert len(choice["logprobs"]["top_logprobs"]) == len(prompt) + 1
    (whole,) = cluster.complete(PET, max_tokens=0, **options)["choices"]
    check_echo(cluster.model, ids, whole["logprobs"])
    assert whole["text"] == PET
    assert "prompt_logprobs" not in whole
    first, *others = cluster.stream(PET, max_tokens=4, **options)
    told = first["choices"][0]
    assert told["text"].startswith(PET)
    check_echo(cluster.model, ids, told["logprobs"])
    later = [each["choices"][0]["logprobs"]["tokens"] for each in others]
    assert len(told["logprobs"]["tokens"]) + sum(map(len, later)) == len(ids) + 4


def test_offsets_begin_with_the_echo(cluster: WarmCluster) -> None:
    prompt, options = "Zoë 🙂 naïve 叫", {"echo": True, "logprobs": 0, "max_tokens": 12, "seed": 3}
    for given in (prompt, reference.encode(cluster.model, prompt)):
        (choice,) = cluster.complete(given, temperature=1.5, **options)["choices"]
        check_offsets(choice["text"], choice["logprobs"])
        parts = [each["choices"][0] for each in cluster.stream(given, temperature=1.5, **options)]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        joined = {key: [x for part in told for x in part[key]] for key in ("tokens", "text_offset")}
        assert joined == {key: choice["logprobs"][key] for key in joined}
        assert "".join(part["text"] for part in parts) == choice["text"]


def check_offsets(text: str, told: dict[str, Any]) -> None:
    """Each token's text is where it says, but for a BOS, and parts of characters."""
    offsets = told["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
    whole = [
        (name, offset)
        for name, offset in zip(told["tokens"], offsets, strict=True)
        if not name.startswith(("bytes:", "<"))
    ]
    assert len(whole) > 8 and len(whole) < len(offsets)
    for name, offset in whole:
        assert text[offset:].startswith(name), (name, offset, text)


def check_echo(folder: Path, prompt: tuple[int, ...], told: dict[str, Any], more: int = 0) -> None:
    rows = reference.prompt_logprobs(folder, prompt)
    end = len(prompt)
    first, *own = told["token_logprobs"][:end]
    assert first is None and told["top_logprobs"][0] is None
    assert len(told["tokens"]) == len(told["text_offset"]) >= end + more
    expected = [row[token].item() for row, token in zip(rows, prompt[1:], strict=True)]
    assert own == pytest.approx(expected, abs=1e-3)
    for name, row, token, top in zip(
        told["tokens"][1:end], rows, prompt[1:], told["top_logprobs"][1:end], strict=True
    ):
        best = max(top, key=lambda each: top[each])
        assert top[best] == pytest.approx(row.max().item(), abs=1e-3) and name in top
        if row.topk(2).values.diff().abs().item() > 1e-3:
            assert (best == name) == (row.argmax().item() == token)


def test_chat_has_prompt_logprobs(cluster: WarmCluster) -> None:
    prompt = tuple(cluster.post("/tokenize", messages=CHAT).json()["tokens"])
    answer = cluster.post(
        "/v1/chat/completions", messages=CHAT, max_tokens=2, n=2, prompt_logprobs=0
    ).json()
    first, *told = answer["prompt_logprobs"]
    rows = reference.prompt_logprobs(cluster.model, prompt)
    assert first is None and len(answer["choices"]) == 2
    found = [
        entries[str(token)]["logprob"] for entries, token in zip(told, prompt[1:], strict=True)
    ]
    expected = [row[token].item() for row, token in zip(rows, prompt[1:], strict=True)]
    assert found == pytest.approx(expected, abs=1e-3)


def test_the_end_of_a_prompt_and_token_ids(cluster: WarmCluster) -> None:
    ids = tuple(reference.encode(cluster.model, PET))
    answer = cluster.complete(
        PET, max_tokens=8.0, truncate_prompt_tokens=20, return_token_ids=True, logprobs=20
    )
    (choice,) = answer["choices"]
    assert tuple(choice["prompt_token_ids"]) == ids[-20:]
    assert tuple(choice["token_ids"]) == tuple(reference.greedy(cluster.model, ids[-20:], 8))
    assert len(choice["logprobs"]["top_logprobs"][0]) == 20


def test_the_best_of_several(cluster: WarmCluster) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "logprobs": 0}
    drawn = cluster.complete(PET, n=4, **options)["choices"]

    def likelihood(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs)) / len(logprobs)

    best = sorted(drawn, key=likelihood, reverse=True)[:2]
    answer = cluster.complete(PET, n=2, best_of=4, **{**options, "logprobs": None})
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in best]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["tokens"]) for choice in drawn
    )


def test_tokenize_and_back(cluster: WarmCluster) -> None:
    answer = cluster.post("/tokenize", model=MODEL, prompt=PET).json()
    assert answer["tokens"] == reference.encode(cluster.model, PET)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), WINDOW)
    assert cluster.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": PET}
    chat = cluster.post("/tokenize", messages=CHAT).json()
    back = cluster.post("/detokenize", tokens=chat["tokens"]).json()["prompt"]
    assert back == f"<|im_start|>user\n{CHAT[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


# ---- ends -----------------------------------------------------------------------------------


def test_one_token(cluster: WarmCluster) -> None:
    answer = cluster.complete(PET, max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    whole = expected(cluster.model, PET, 2)
    assert text_of(cluster.stream(PET, max_tokens=2)) == whole
    two = cluster.complete(PET, max_tokens=1, n=2)
    assert [choice["text"] for choice in two["choices"]] == [text(answer)] * 2


def test_the_end_of_a_story_stops(cluster: WarmCluster) -> None:
    answer = cluster.complete(BEDTIME, max_tokens=100)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] < 100
    assert "<|" not in text(answer)
    num_tokens = answer["usage"]["completion_tokens"]
    assert text(answer) == expected(cluster.model, BEDTIME, num_tokens)
    longer = cluster.complete(BEDTIME, max_tokens=num_tokens + 3, ignore_eos=True)
    assert longer["usage"]["completion_tokens"] == num_tokens + 3
    assert longer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("token", [END_OF_TEXT, IM_END])
def test_min_tokens_puts_off_the_end(cluster: WarmCluster, token: int) -> None:
    eager = {"logit_bias": {str(token): 100}, "max_tokens": 20}
    at_once = cluster.complete(PET, **eager)
    assert (text(at_once), at_once["usage"]["completion_tokens"]) == ("", 1)
    later = cluster.complete(PET, **eager, min_tokens=5)
    assert later["usage"]["completion_tokens"] == 6
    assert later["choices"][0]["finish_reason"] == "stop"
    never = cluster.complete(PET, **eager, ignore_eos=True)
    assert never["usage"]["completion_tokens"] == 20


def test_stop_token_ids(cluster: WarmCluster) -> None:
    ids = reference.greedy(cluster.model, tuple(reference.encode(cluster.model, PET)), 30)
    stop = ids[12]
    position = ids.index(stop)
    answer = cluster.complete(PET, max_tokens=30, stop_token_ids=[stop])
    assert answer["usage"]["completion_tokens"] == position + 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == stop
    assert text(answer) == reference.decode(cluster.model, ids[:position])


def test_a_chat_answer_fills_the_window_at_most(cluster: WarmCluster) -> None:
    content = PET * 19
    used = cluster.post("/tokenize", messages=[{"role": "user", "content": content}]).json()
    response = cluster.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": content}],
        ignore_eos=True,
    ).json()
    assert response["usage"]["prompt_tokens"] == used["count"]
    assert response["usage"]["total_tokens"] == WINDOW
    assert response["choices"][0]["finish_reason"] == "length"


# ---- sampling -------------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_whole_streamed_and_with_a_warm_cache(
    cluster: WarmCluster,
) -> None:
    prompt = "A prompt that no other test asks for. " + STAR
    options: dict[str, Any] = {"seed": 11, "temperature": 1.0, "max_tokens": 40}
    cold = cluster.complete(prompt, **options)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    warm = cluster.complete(prompt, **options)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert text(cold) == text(warm) == text_of(cluster.stream(prompt, **options))
    others = {text(cluster.complete(prompt, **{**options, "seed": seed})) for seed in range(5)}
    assert len({*others, text(cold)}) > 2


def test_no_seed_means_a_random_one(cluster: WarmCluster) -> None:
    answers = {text(cluster.complete(PET, temperature=2.0, max_tokens=30)) for _ in range(4)}
    assert len(answers) > 1


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_only_the_likeliest_token_is_greedy(cluster: WarmCluster, only: dict[str, float]) -> None:
    answer = cluster.complete(PET, temperature=1.0, max_tokens=24, seed=1, **only)
    assert text(answer) == expected(cluster.model, PET, 24)


def test_logit_bias_forces_a_token(cluster: WarmCluster) -> None:
    (token,) = reference.encode(cluster.model, "a")
    answer = cluster.complete(PET, max_tokens=5, logit_bias={str(token): 100})
    assert text(answer) == "aaaaa"


ONLY = tuple(range(60, 300, 7))


def test_allowed_token_ids_are_the_references(cluster: WarmCluster, client: openai.OpenAI) -> None:
    prompt = tuple(reference.encode(cluster.model, PET))
    ids = reference.greedy(cluster.model, prompt, 24, ONLY)
    assert set(ids) <= set(ONLY) and len(set(ids)) > 2
    options: dict[str, Any] = {"max_tokens": 24, "allowed_token_ids": list(ONLY)}
    answer = cluster.complete(PET, **options, n=2, logprobs=1)
    words = [choice["text"] for choice in answer["choices"]]
    assert words == [reference.decode(cluster.model, ids)] * 2
    assert text_of(cluster.stream(PET, **options)) == words[0]
    # What is not allowed is as likely as ever.
    rows = log_probabilities(cluster.model, prompt, ids)
    raw = rows[range(24), ids].tolist()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(raw, abs=1e-3)
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=24, temperature=0,  # type: ignore[arg-type]
        extra_body={"allowed_token_ids": list(ONLY)},
    )  # fmt: skip
    tokens = cluster.post("/tokenize", messages=CHAT).json()["tokens"]
    ids = reference.greedy(cluster.model, tuple(tokens), 24, ONLY)
    assert chat.choices[0].message.content == reference.decode(cluster.model, ids)


def test_bad_words_do_not_come(cluster: WarmCluster, client: openai.OpenAI) -> None:
    """Whole, streamed and in a chat; nor do those that come in their stead."""
    prompt, words = tuple(reference.encode(cluster.model, PET)), list[str]()
    chat = tuple(cluster.post("/tokenize", messages=CHAT).json()["tokens"])
    for _ in range(4):
        ids = reference.bad_words(cluster.model, *words)
        spelt = reference.greedy(cluster.model, prompt, 30, bad_words=ids)
        expected = reference.decode(cluster.model, spelt)
        assert not [word for word in words if f" {word} " in expected]
        options: dict[str, Any] = {"max_tokens": 30, "bad_words": words, "ignore_eos": True}
        assert text(cluster.complete(PET, **options)) == expected
        assert text_of(cluster.stream(PET, **options)) == expected
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=30, temperature=0,  # type: ignore[arg-type]
            extra_body={"bad_words": words, "ignore_eos": True},
        )  # fmt: skip
        spelt = reference.greedy(cluster.model, chat, 30, bad_words=ids)
        assert answer.choices[0].message.content == reference.decode(cluster.model, spelt)
        longest = sorted(re.findall(r" (\w+)\b", expected), key=len)
        words += {longest[-1], longest[0]}
    assert any(len(each) > 2 for each in ids) and any(len(each) == 1 for each in ids)


def test_bad_words_with_other_parameters(cluster: WarmCluster) -> None:
    a, b = reference.encode(cluster.model, "a")[0], reference.encode(cluster.model, "b")[0]
    options: dict[str, Any] = {"max_tokens": 12, "allowed_token_ids": [a, b]}
    bias = {str(b): 100}
    # "bb" is two tokens: the second does not come after the first.
    assert reference.encode(cluster.model, "bb") == [b, b]
    assert text(cluster.complete(PET, **options, logit_bias=bias, bad_words=["bb"])) == "ba" * 6
    answer = cluster.complete(
        PET, **options, n=3, temperature=2.0, seed=5, bad_words=["bb"], stop=["aaa"], min_tokens=4
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) > 1 and not any("bb" in each for each in texts)
    # Nothing is left to come: the client's mistake, found out with the second token.
    nothing = {**options, "bad_words": ["a", "bb"], "logprobs": 1}
    error = check_error(cluster.post("/v1/completions", prompt=PET, **nothing), 400, None)
    assert "no token is allowed" in error["message"]
    events = cluster.post("/v1/completions", prompt=PET, **nothing, stream=True).text
    assert '"text":"b"' in events and '"type":"invalid_request_error"' in events
    assert all(node["state"] == "ready" for node in cluster.nodes())


def test_allowed_token_ids_combine_with_other_parameters(cluster: WarmCluster) -> None:
    a, b = reference.encode(cluster.model, "a")[0], reference.encode(cluster.model, "b")[0]
    options: dict[str, Any] = {"max_tokens": 12, "allowed_token_ids": [a, b]}
    drawn = [
        text(cluster.complete(PET, temperature=2.0, seed=seed, **options)) for seed in range(4)
    ]
    assert all(set(each) <= {"a", "b"} and len(each) == 12 for each in drawn), "and no end"
    assert text(cluster.complete(PET, temperature=2.0, seed=0, **options)) == drawn[0]
    assert text(cluster.complete(PET, **options, logit_bias={str(b): 100})) == "b" * 12
    turns = text(cluster.complete(PET, **options, presence_penalty=2, frequency_penalty=2))
    assert set(turns) == {"a", "b"}
    bias = {str(b): 100}
    stopped = cluster.complete(PET, **options, logit_bias=bias, stop=["bbb"], min_tokens=5)
    assert text(stopped) == "b" * 3 and stopped["usage"]["completion_tokens"] == 6
    stopped = cluster.complete(PET, **options, logit_bias=bias, stop_token_ids=[b], min_tokens=5)
    assert text(stopped) == "a" * 5 and stopped["choices"][0]["stop_reason"] == b
    # Before so many tokens the end may not come, and nothing else is allowed.
    ends = cluster.post("/v1/completions", prompt=PET, allowed_token_ids=[IM_END], min_tokens=2)
    assert "no token is allowed" in check_error(ends, 400, None)["message"]
    # The end may come where it is allowed.
    end = {**options, "allowed_token_ids": [a, IM_END]}
    assert text(cluster.complete(PET, **end, logit_bias={str(IM_END): 100}, min_tokens=3)) == "aaa"


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}],
)
def test_penalties_change_the_text(cluster: WarmCluster, penalty: dict[str, float]) -> None:
    # The model is too sure of itself to be swayed where it is greedy.
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 2.0, "seed": 3}
    plain = text(cluster.complete(PET, **options))
    changed = text(cluster.complete(PET, **options, **penalty))
    assert changed != plain
    assert text_of(cluster.stream(PET, **options, **penalty)) == changed


def test_completion_logprobs_are_the_references(cluster: WarmCluster) -> None:
    prompt = reference.encode(cluster.model, PET)
    answer = cluster.complete(PET, max_tokens=20, logprobs=5)["choices"][0]["logprobs"]
    ids = list(reference.greedy(cluster.model, tuple(prompt), 20))
    rows = log_probabilities(cluster.model, prompt, ids)
    assert len(answer["tokens"]) == len(answer["text_offset"]) == 20
    likeliest = [row.max().item() for row in rows]
    assert answer["token_logprobs"] == pytest.approx(likeliest, abs=1e-3)
    best = [max(top.values()) for top in answer["top_logprobs"]]
    assert best == pytest.approx(likeliest, abs=1e-3)


def test_chat_logprobs_are_the_references(cluster: WarmCluster) -> None:
    prompt = cluster.post("/tokenize", messages=CHAT).json()["tokens"]
    answer = cluster.post(
        "/v1/chat/completions", messages=CHAT, max_tokens=20, temperature=0, logprobs=True,
        top_logprobs=5,
    ).json()["choices"][0]["logprobs"]["content"]  # fmt: skip
    ids = reference.greedy(cluster.model, tuple(prompt), 20)
    rows = log_probabilities(cluster.model, prompt, ids)
    for entry, row in zip(answer, rows, strict=True):
        assert entry["logprob"] == pytest.approx(row.max().item(), abs=1e-3)
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert top == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)


def log_probabilities(folder: Path, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocabulary]: of each token given what is before it."""
    model, _ = reference.load(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


# ---- prompts --------------------------------------------------------------------------------


def test_prompt_forms_agree(cluster: WarmCluster) -> None:
    ids, other = reference.encode(cluster.model, PET), reference.encode(cluster.model, STAR)
    one, two = expected(cluster.model, PET, 12), expected(cluster.model, STAR, 12)
    for prompt, answers in (
        (PET, [one]), (ids, [one]), ([PET, STAR], [one, two]), ([ids, other], [one, two]),
    ):  # fmt: skip
        choices = cluster.complete(prompt, max_tokens=12)["choices"]
        assert [choice["text"] for choice in choices] == answers
    answer = cluster.complete([ids, other], max_tokens=12, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [one, one, two, two]
    assert answer["usage"]["prompt_tokens"] == len(ids) + len(other)
    assert answer["usage"]["completion_tokens"] == 48
    streamed = dict.fromkeys(range(4), "")
    for event in cluster.stream([ids, other], max_tokens=12, n=2):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(streamed.values()) == [one, one, two, two]


def test_a_repeated_prompt_is_cached(cluster: WarmCluster) -> None:
    prompt = [7 + i % 100 for i in range(100)]
    first, second = (cluster.complete(prompt, **SHORT) for _ in range(2))
    assert text(first) == text(second)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_a_cached_prompt_is_found_with_the_same_salt_alone(cluster: WarmCluster) -> None:
    """On the prefill node (`cached_tokens`) and on the decode node (bytes that need not travel)."""
    prompt = [9 + i % 90 for i in range(100)]

    def ask(salt: str | None) -> tuple[str, int, int]:
        body = {"prompt": prompt, "temperature": 0, "cache_salt": salt, **SHORT}
        url, headers = f"{cluster.url}/v1/completions", {TIMELINE_HEADER: "1"}
        answer = requests.post(url, json=body, headers=headers, timeout=60).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return text(answer), cached, answer["pdserve"]["timeline"]["transfer_bytes"]

    first, second = [[ask(salt) for salt in (None, "a", "b")] for _ in range(2)]
    assert len({each[0] for each in first + second}) == 1
    assert [cached for _, cached, _ in first + second] == [0, 0, 0, 96, 96, 96]
    whole = first[0][2]
    assert [nbytes for _, _, nbytes in first] == [whole] * 3
    assert all(0 < nbytes < whole / 4 for _, _, nbytes in second)


def test_a_reset_of_the_prefix_caches(cluster: WarmCluster) -> None:
    prompt = [11 + i % 80 for i in range(100)]

    def ask() -> tuple[str, int]:
        answer = cluster.complete(prompt, **SHORT)
        return text(answer), answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, again = ask(), ask()
    assert cluster.post("/reset_prefix_cache").status_code == 200
    after, last = ask(), ask()
    assert len({words for words, _ in (first, again, after, last)}) == 1
    assert [cached for _, cached in (first, again, after, last)] == [0, 96, 0, 96]


# ---- errors ---------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": None}, 400, "prompt"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"cache_salt": 7}, 400, "cache_salt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),  # the tokenizer gives no BOS
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [VOCABULARY]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [5] * WINDOW}, 400, "prompt"),
    ({"model": "other"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "5.5"}, 400, "max_tokens"),
    ({"max_tokens": WINDOW}, 400, "prompt"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"n": 0}, 400, "n"),
    ({"best_of": 1, "n": 2}, 400, "best_of"),
    ({"seed": -2}, 400, "seed"),
    ({"stop": ["a" * i for i in range(1, 258)]}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop_token_ids": [VOCABULARY]}, 400, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {str(VOCABULARY): 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCABULARY]}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [5, -1]}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [5.5]}, 400, "allowed_token_ids[0]"),
    ({"allowed_token_ids": 5}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [5] * 1025}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "min_tokens": 1, "stop_token_ids": [5]}, 400, "min_tokens"),
    ({"bad_words": [""]}, 400, "bad_words"),
    ({"bad_words": ["a", "  "]}, 400, "bad_words"),
    ({"bad_words": ["x" * 65]}, 400, "bad_words"),
    ({"bad_words": ["x"] * 129}, 400, "bad_words"),
    ({"bad_words": ["🐶" * 64]}, 400, "bad_words"),
    ({"bad_words": "word"}, 400, "bad_words"),
    ({"bad_words": [5]}, 400, "bad_words[0]"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"stream": "yes"}, 400, "stream"),
]
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "x" * 4 * WINDOW}]}, "messages"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


def check_error(response: requests.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert response.headers["X-Request-Id"]
    return error


def test_wrong_completions(cluster: WarmCluster) -> None:
    for fields, status, param in WRONG:
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream, **fields}
            check_error(cluster.post("/v1/completions", **body), status, param)


def test_wrong_chats(cluster: WarmCluster) -> None:
    for fields, param in WRONG_CHATS:
        response = cluster.post("/v1/chat/completions", **{"messages": CHAT, **fields})
        check_error(response, 400, param)


def test_wrong_requests(cluster: WarmCluster) -> None:
    url = f"{cluster.url}/v1/completions"
    check_error(requests.post(url, data=b"{", timeout=60), 400, None)
    check_error(requests.post(url, data=b"[]", timeout=60), 400, None)
    nan = b'{"prompt": "a", "temperature": NaN}'
    assert requests.post(url, data=nan, timeout=60).status_code == 400
    text_type = {"Content-Type": "text/plain"}
    check_error(requests.post(url, data=b"{}", headers=text_type, timeout=60), 415, None)
    check_error(requests.get(url, timeout=60), 405, None)
    check_error(cluster.get("/v1/nothing"), 404, None)
    check_error(cluster.get("/v1/models/other"), 404, "model")
    check_error(cluster.post("/detokenize", tokens=[VOCABULARY]), 400, "tokens")


def test_unknown_fields_are_ignored(cluster: WarmCluster) -> None:
    answer = cluster.complete(PET, max_tokens=3, frobnicate=True, user="someone")
    assert text(answer) == expected(cluster.model, PET, 3)


def test_hosted_tools_and_the_like_are_left_out_and_named(cluster: WarmCluster) -> None:
    plain: dict[str, Any] = {"temperature": 0, "tools": [{"type": "web_search"}], "store": True}
    chat = {"messages": CHAT, "max_tokens": 12, "reasoning_effort": "high", "verbosity": "low"}
    items = {"input": CHAT, "max_output_tokens": 12, "text": {"verbosity": "low"}}
    turns = {"messages": CHAT, "max_tokens": 12, "thinking": {"type": "adaptive"}}
    for path, body, names in (
        ("/v1/chat/completions", chat, "tools.web_search, store, verbosity"),
        ("/v1/responses", items, "tools.web_search, store, text.verbosity"),
        ("/v1/messages", turns, "tools.web_search, store"),
    ):
        answer = cluster.post(path, **plain, **body)
        assert answer.status_code == 200, answer.text
        named = answer.headers["X-Ignored-Parameters"]
        assert sorted(named.split(", ")) == sorted(names.split(", "))


def test_absent_endpoints_and_media_name_themselves(cluster: WarmCluster) -> None:
    error = cluster.post("/v1/embeddings", model=MODEL, input="a").json()["error"]
    assert error["code"] == "unsupported_endpoint" and "embeddings" in error["message"]
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    messages = [{"role": "user", "content": [part]}]
    error = cluster.post("/v1/chat/completions", messages=messages).json()["error"]
    assert "images are not supported" in error["message"]


def test_an_echo_and_its_answer_are_one_text(cluster: WarmCluster) -> None:
    """Wherever the prompt's ids end, and streamed as well."""
    ids = reference.encode(cluster.model, "Zoë 🙂")
    options: dict[str, Any] = {"echo": True, "max_tokens": 6, "return_token_ids": True}
    for end in range(2, len(ids) + 1):
        (choice,) = cluster.complete(ids[:end], **options)["choices"]
        tokens = [*ids[:end], *choice["token_ids"]]
        whole = cluster.post("/detokenize", tokens=tokens).json()["prompt"]
        assert choice["text"] == whole
        parts = list(cluster.stream(ids[:end], **options))
        assert "".join(text(part) for part in parts) == whole


# ---- the rest -------------------------------------------------------------------------------


def test_the_request_id_is_echoed_and_in_every_log(cluster: WarmCluster) -> None:
    url, own = f"{cluster.url}/v1/completions", {"X-Request-Id": "my-own-id-17"}
    body = {"prompt": PET, "max_tokens": 2}
    for stream in (False, True):
        answer = requests.post(url, json={**body, "stream": stream}, headers=own, timeout=30)
        assert answer.headers["X-Request-Id"] == "my-own-id-17"
    answers = [requests.post(url, json=body, timeout=30) for _ in range(2)]
    assert len({answer.headers["X-Request-Id"] for answer in answers}) == 2
    assert "my-own-id-17" in cluster.log()


def test_the_server_describes_itself(cluster: WarmCluster) -> None:
    assert cluster.get("/health").status_code == 200
    assert cluster.get("/ready").json() == {"status": "ready"}
    assert cluster.get("/version").json()["version"]
    (card,) = cluster.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, WINDOW)
    state = cluster.get("/v1/cluster").json()
    assert state["ready"] is True
    assert {node["role"]: node["state"] for node in state["nodes"]} == {
        "prefill": "ready",
        "decode": "ready",
    }
    assert len(state["pairings"]) == 1
    cluster.complete(PET, max_tokens=1)
    metrics = cluster.get("/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert f'pdserve_requests_total{{code="OK",model_name="{MODEL}"}}' in metrics.text
    ready = f'pdserve_nodes{{model_name="{MODEL}",role="decode",state="ready"}} 1.0'
    assert ready in metrics.text


def test_the_timeline_tells_the_stations_in_order(cluster: WarmCluster) -> None:
    header = {"X-Pdserve-Timeline": "1"}
    body = {"prompt": PET * 2, "max_tokens": 8, "ignore_eos": True}
    url = f"{cluster.url}/v1/completions"
    line = requests.post(url, json=body, headers=header, timeout=30).json()["pdserve"]["timeline"]
    assert line["transfer_bytes"] > 0
    stations = ("queued", "reserved", "first_token", "transferred", "finished")
    times = [line[station] for station in stations]
    assert times == sorted(times)
