"""A checkpoint's tokenizer and template are tried at start, within bounds; later a template that is
not known to be cheap runs in a child."""

from __future__ import annotations

import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from benchmarks.bench_bodies import router
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.router import ChatConfig
from pdserve.common.core.apart import Bounds
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.router.api import trial
from pdserve.router.api.conversation import MAX_PARTS, CostlyTemplate, Templates
from pdserve.router.api.preprocess import Preprocessor
from pdserve.router.api.template_syntax import is_plain
from pdserve.router.api.trial import load_tried
from pdserve.router.cluster.served_model import load_served_model
from thinned import only


def checkpoint(folder: Path, template: str | None = None, **tokenizer: Any) -> ModelConfig:
    shutil.copytree(MODELS / "llama-gqa", folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **tokenizer}))
    if template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return ModelConfig(model=str(folder))


def replacing(pattern: dict[str, str], content: str, times: int = 1) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


DOUBLING = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
SPECIAL = {"SpecialToken": {"id": "x", "type_id": 0}}
MANY = {"id": "x", "ids": [0] * 5000, "tokens": ["x"] * 5000}
TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "doubles a": ({"normalizer": replacing({"String": "a"}, "aa", 40)}, "takes more than"),
    "doubles zq": ({"normalizer": replacing({"String": "zq"}, "zqzq", 40)}, "takes more than"),
    "tries all ways": ({"normalizer": replacing({"Regex": "(x|xx)+$"}, "y")}, "retry-limit"),
    "empty match": ({"normalizer": replacing({"Regex": "(?=.)"}, "bbbb")}, "PanicException"),
    "split": (
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"(\w+\s?)*$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        "retry-limit",
    ),
    "charsmap that cannot be parsed": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "Cannot parse precompiled_charsmap",
    ),
    "charsmap of an endless size": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "ends its process",
    ),
    "charsmap without entries": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}},
        "index out of bounds",
    ),
    "decoder": (
        {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 40}},
        "takes more than",
    ),
    "strip": (
        {"decoder": {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}},
        "PanicException",
    ),
    "many tokens": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}, SPECIAL],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"x": MANY},
            }
        },
        "tokens of 0 characters",
    ),
}
TEMPLATES = {
    "rounds": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    "memory": "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "product": "{{ 'a' * 3000000000 }}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "filter": "{{ 'a' | center(3000000000) }}",
}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times what an honest tokenizer of a test takes."""
    monkeypatch.setattr(trial, "TEXTS", Bounds(cpu_seconds=1.0, memory=256 * 2**20))
    monkeypatch.setattr(trial, "BOUNDS", Bounds(cpu_seconds=0.5, memory=256 * 2**20))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_at_start(name: str, tmp_path: Path) -> None:
    changes, said = TOKENIZERS[name]
    with pytest.raises(ConfigError) as caught:
        load_tried(checkpoint(tmp_path / "model", **changes))
    assert said in caught.value.message and "\n" not in caught.value.message


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_refused_at_start(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat template \(--chat-template replaces it\)"):
        load_tried(checkpoint(tmp_path / "model", TEMPLATES[name]))


@pytest.mark.parametrize("name", ["qwen2", "mistral", "tool-caller"])
def test_an_honest_model_is_cheap(name: str) -> None:
    model, cheap = load_tried(ModelConfig(model=str(MODELS / name)))
    assert cheap and model.tokenizer.encode("a")


@pytest.mark.parametrize("pre", only(sorted(GGUF_PRE_TOKENIZER_SPLITS), ("gpt-4o", "qwen2")))
def test_known_patterns_pass(pre: str, tmp_path: Path) -> None:
    splits = GGUF_PRE_TOKENIZER_SPLITS[pre]
    steps = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in ([splits] if isinstance(splits, str) else splits)
    ]
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
    }  # fmt: skip
    sequence = {"type": "Sequence", "pretokenizers": [*steps, byte_level]}
    load_tried(checkpoint(tmp_path / "model", pre_tokenizer=sequence))


TOOLS = (
    "{% for m in messages %}{% if loop.index0 % 2 %}{{ m.content | trim }}{% else %}"
    "{{ m.role ~ '+' ~ m.content }}{% endif %}{% endfor %}{% for t in tools %}{{ t | tojson }}"
    "{% endfor %}"
)
NESTED = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}"
    "{{ a.content }}{% endfor %}"
)


def test_a_template_with_nested_loops_is_not_cheap(tmp_path: Path) -> None:
    assert is_plain(NESTED)
    assert not load_tried(checkpoint(tmp_path / "model", NESTED))[1]


@pytest.mark.parametrize(
    "costly",
    [
        "{% if messages[0].content == 'now' %}{{ 'a' * messages[0].n }}{% endif %}",
        "{% for a in range(5000) %}{% endfor %}",
        "{{ 'a'.center(messages[0].n) }}",
        "{{ '%9d' % messages[0].n }}",
        "{{ messages | random }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 2 ** messages[0].n }}",
        "{% for",
        "a" * 2**19,
    ],
)
def test_syntax_that_no_trial_can_bound(costly: str) -> None:
    assert not is_plain(costly)


# ---- later -----------------------------------------------------------------------------------


def chat(count: int, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}] * count, **fields}).encode()


def test_a_conversation_beyond_the_trial_is_for_a_child(tmp_path: Path) -> None:
    model = load_served_model(checkpoint(tmp_path / "model", NESTED))
    trusting = ChatConfig(trust_request_chat_template=True)

    def ids(templates: Templates, raw: bytes) -> int:
        asked = Preprocessor(model, trusting, templates=templates)
        return len(asked.preprocess("tokenize", raw).prompts[0])

    assert ids("ordinary", chat(5)) == ids("own apart", chat(5)) == ids("here", chat(5))
    mode: Templates
    for mode, raw, own in (
        ("ordinary", chat(MAX_PARTS + 1), True),
        ("elsewhere", chat(1), True),
        ("ordinary", chat(1, chat_template="a"), False),
        ("own apart", chat(1, chat_template="a"), False),
        ("own apart", chat(1, chat_template_kwargs={"a": 10**9}), False),
    ):
        with pytest.raises(CostlyTemplate) as costly:
            ids(mode, raw)
        assert costly.value.own == own
    with pytest.raises(InvalidRequest, match="the chat template takes more than") as refused:
        ids("own apart", chat(2000))
    assert refused.value.param == "messages"


def test_a_costly_template_never_holds_the_event_loop(tmp_path: Path) -> None:
    """A conversation of a few kilobytes takes a template of nested loops minutes."""
    config = checkpoint(tmp_path / "model", NESTED)
    with router(str(config.model)) as (_, port), ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{port}"

        def ask(count: int) -> requests.Response:
            return requests.post(f"{url}/tokenize", data=chat(count), timeout=60)

        assert ask(1).json()["count"] >= 1
        asked, waits = pool.submit(ask, 1500), []
        while not asked.done():
            begin = time.monotonic()
            assert requests.get(f"{url}/version", timeout=60).status_code == 200
            waits.append(time.monotonic() - begin)
            time.sleep(0.05)
        assert asked.result().status_code == 400 and "takes more than" in asked.result().text
        assert len(waits) > 10 and sorted(waits)[len(waits) // 2] < 0.5


# ---- changed at random -----------------------------------------------------------------------


def changed(text: str, random_: random.Random) -> str:
    for _ in range(random_.choice([1, 1, 2, 8])):
        at = random_.randrange(len(text))
        end = at + random_.randrange(4)
        bits = [
            "",
            '"',
            "{",
            "]",
            "-1",
            "99999999999",
            "null",
            "a" * 99,
            "\\",
            "{%",
            "}}",
            "(",
            "+",
        ]
        text = text[:at] + random_.choice([*bits, text[at : at + 50] * 3]) + text[end:]
    return text


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("times", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_changed_files_load_or_are_refused(times: int, tmp_path: Path) -> None:
    """Tokenizer (without its vocabulary), template and the other files: nothing but a ConfigError,
    and no child is left."""
    config = checkpoint(tmp_path / "model", TOOLS)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
    files = [tmp_path / "model" / name for name in names]
    random_, before = random.Random(48), psutil.Process().children()
    outcomes = []
    for _ in range(times):
        file = random_.choice(files)
        text = file.read_text()
        head, vocab, rest = text.partition('"model"')
        file.write_text(changed(head, random_) + vocab + rest)
        try:
            outcomes.append(load_tried(config)[1])
        except ConfigError as error:
            assert "\n" not in error.message
            outcomes.append(None)
        file.write_text(text)
    assert None in outcomes and set(outcomes) != {None}
    assert psutil.Process().children() == before
