"""Whatever `config.json` and the weights' files say, a checkpoint is read or refused in one
sentence."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.checkpoint_config import read_json
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.checkpoint import INDEX_FILE, weights_revision
from pdserve.common.model.implementation import load_decoder
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import Footprint
from windowed import LATENTS

WRONG: list[Any] = [
    -1, 0, 10**12, 10**30, "4", "", None, True, 1.5, float("nan"), float("inf"), [], [1, 2],
    ["x"], [["x"]], {}, {"a": 1},
]  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "dynamic": {},
    "modules_in_block_to_quantize": [["q_proj"]],
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
        }
    },
}
MORE = {
    "head_dim": 16,
    "sliding_window": 24,
    "use_sliding_window": True,
    "layer_types": None,
    "text_config": {},
    "max_window_layers": 1,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0,
}
ROPE = {
    "factor": 2.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "attention_factor": 1.0,
    "beta_fast": 32.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "short_factor": [1.0] * 16,
}


def of(name: str, **changes: Any) -> dict[str, Any]:
    return {**MORE, **json.loads((MODELS / name / "config.json").read_text()), **changes}


BASES = {
    "llama": of("llama-gqa"),
    "mistral": of("mistral"),
    "mixtral": of("mixtral"),
    "qwen2-moe": of("qwen2-moe"),
    "deepseek": {
        **LATENTS["deepseek"].to_dict(),
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    },
    "awq": of("llama-gqa", quantization_config=AWQ),
    "gptq": of("llama-gqa", quantization_config=GPTQ),
    "packed": of("llama-gqa", quantization_config=PACKED),
    **{
        f"{name} with {kind} rope": {**base, "rope_theta": None, place: {"rope_type": kind, **ROPE}}
        for name, base in (("llama", of("llama-gqa")), ("deepseek", LATENTS["deepseek"].to_dict()))
        for place, kind in (
            ("rope_scaling", "linear"),
            ("rope_parameters", "llama3"),
            ("rope_scaling", "yarn"),
            ("rope_parameters", "longrope"),
            ("rope_scaling", "dynamic"),
        )
    },
}


def changed(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the config without each of its values, also nested ones, and with wrong ones."""
    for key, value in config.items():
        yield {k: v for k, v in config.items() if k != key}
        for wrong in WRONG:
            yield {**config, key: wrong}
        if isinstance(value, dict):
            for inner in changed(value):
                yield {**config, key: inner}


@pytest.mark.parametrize("name", BASES)
def test_wrong_values_are_planned_or_refused(name: str) -> None:
    """Some are right for another reason, such as a size that no GPU has."""
    refused = 0
    for config in changed(BASES[name]):
        try:
            spec = ModelSpec.from_config(config)
        except ConfigError as error:
            refused += 1
            assert "\n" not in error.message and len(error.message) < 800
            continue
        whole, footprint = Stage.whole(spec.num_layers), Footprint(spec, spec.dtype)
        assert footprint.weights(whole) > 0 and footprint.activations(whole, 64, 8) > 0
        assert footprint.kv_per_token(whole) > 0 and spec.max_position_embeddings > 0
    assert refused > 100


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": -4}, "num_attention_heads must be a whole number from 1 to"),
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers must be a whole number from 1 to 1024, not 0",
        ),
        ({"vocab_size": 10**12}, "vocab_size must be .* not 1000000000000"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number .* not '64'"),
        ({"head_dim": 15}, "heads of 15 numbers cannot be rotated"),
        ({"hidden_size": 2, "head_dim": None}, "heads of 0 numbers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 do not divide num_attention_heads 4"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope: rope_theta must be .* not nan"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            "factor must be a positive number",
        ),
        ({"eos_token_id": [0, -1]}, "eos_token_id must be a token's number or a list"),
        ({"rms_norm_eps": "x" * 10**6}, r"rms_norm_eps must be .{0,120}more characters\)$"),
        ({"quantization_config": {**PACKED, "ignore": ["re:("]}}, "is not a regular expression"),
    ],
)
def test_the_sentence_names_the_value(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelSpec.from_config(of("llama-gqa", **changes))


@pytest.mark.parametrize("content", [b"[" * 10**5, b"\0", b"\xff\xfe", b"[]", b"1" * 10**4, b""])
def test_values_that_are_not_json_objects_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="has more than"):
        read_json(tmp_path / "config.json")


# ---- files of weights ----


FILE = "model.safetensors"
RAW = (MODELS / "llama-gqa" / FILE).read_bytes()
LENGTH = struct.unpack("<Q", RAW[:8])[0]
HEADER, DATA = json.loads(RAW[8 : 8 + LENGTH]), RAW[8 + LENGTH :]
FIRST, SECOND = [name for name in HEADER if name != "__metadata__"][:2]


def header(changes: Any = None, data: bytes = DATA, length: int | None = None) -> bytes:
    """Returns a file in which the first tensor has `changes`, or with a header of these bytes."""
    text = changes
    if not isinstance(changes, bytes):
        text = json.dumps({**HEADER, FIRST: {**HEADER[FIRST], **(changes or {})}}).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "short": b"1234567",
    "a header longer than the file": header(length=2**63),
    "an empty header": header(length=0),
    "no JSON": header(b'{"a":'),
    "a list": header(b"[]"),
    "nested": header(b'{"a":' * 10**5),
    "beyond the end": header({"data_offsets": [0, 10**12]}),
    "negative": header({"data_offsets": [-4, 4]}),
    "reversed": header({"data_offsets": [8, 0]}),
    "64 bits": header({"data_offsets": [2**64 - 8, 2**64 - 1]}),
    "overlapping": header({key: HEADER[SECOND][key] for key in ("data_offsets", "shape")}),
    "strings": header({"data_offsets": ["a", "b"]}),
    "an unknown dtype": header({"dtype": "Q4"}),
    "a negative shape": header({"shape": [-1, 4]}),
    "a huge shape": header({"shape": [2**40, 2**40]}),
    "twice": header(json.dumps(HEADER)[:-1].encode() + f", {json.dumps(FIRST)}: {{}}}}".encode()),
    "control characters": header(
        json.dumps({"../\0\n\x1b[31m" if k == FIRST else k: v for k, v in HEADER.items()}).encode()
    ),
    "cut": header(data=DATA[:-100]),
    "longer": header(data=DATA + b"1234"),
    "without data": header(data=b""),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(MODELS / "llama-gqa", tmp_path / "model")


def assert_refused(folder: Path, impl: str = "native") -> str:
    """Both by what a node does first and by what reads the weights; returns what that said."""
    try:
        weights_revision(folder)
    except ConfigError as error:
        assert error.message.isprintable()
    spec = ModelSpec.from_folder(folder)
    config = ModelConfig(model=str(folder), model_impl=impl)
    sharding = Sharding(GroupCoordinator(), torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError) as found:
        load_decoder(spec, config, sharding, Stage.whole(spec.num_layers))
    assert found.value.message.isprintable() and len(found.value.message) < 1500
    return found.value.message


@pytest.mark.parametrize("name", HEADERS)
def test_a_wrong_file_is_refused(name: str, folder: Path) -> None:
    (folder / FILE).write_bytes(HEADERS[name])
    said = assert_refused(folder)
    assert FILE in said or FIRST in said


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/passwd", ".", "..", "", "a\0b", "a" * 300, "a\n", 5],
)
def test_an_index_names_files_beside_it(name: Any, folder: Path) -> None:
    shutil.copy(folder / FILE, folder.parent / "other.safetensors")
    named = {**dict.fromkeys(HEADER, FILE), FIRST: name}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": named}))
    assert "which is not a file beside it" in assert_refused(folder)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 5}', "[" * 10**5])
def test_a_wrong_index(index: str, folder: Path) -> None:
    (folder / INDEX_FILE).write_text(index)
    assert_refused(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    shutil.copy(folder / FILE, folder / "other.safetensors")
    assert f"tensors that another file has too: {sorted(HEADER.keys() - {'__metadata__'})[0]}" in (
        assert_refused(folder)
    )


def replace_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        file.unlink()
        make(file)

    return edit


@pytest.mark.parametrize(
    "make",
    [lambda file: file.symlink_to(file.name), Path.mkdir, os.mkfifo],
    ids=["a symbolic link to itself", "a folder", "a pipe"],
)
def test_a_path_that_is_no_file_counts_as_missing(
    make: Callable[[Path], None], folder: Path
) -> None:
    replace_by(make)(folder / FILE)
    assert "lacks" in assert_refused(folder)


def test_memory_is_taken_after_the_weights_are_known_to_fit(folder: Path) -> None:
    """Else this vocabulary would be 512 GiB."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2**30}))
    assert "of another shape: model.embed_tokens.weight" in assert_refused(folder)
