"""Models as GGUF files: what is served is what transformers makes of the same file."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_model import split_logits
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
)

from gguf_files import Choose, tiny_folder, write_gguf
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.gguf_index import block_of
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.checkpoint import weights_revision
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import Footprint
from pdserve.demo_model.embedded import resolve_model
from tiny_engine import load, new_cache, some_tokens, step

pytestmark = pytest.mark.usefixtures("inference")

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "eos_token_id": 0,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PDSERVE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES))


def all_of(kind: str) -> Choose:
    return lambda name: kind


def mixed(name: str) -> str:
    """Q4_K_M files are so: the head and half of the down projections have more bits."""
    if name.startswith(("lm_head", "model.embed")) or "0.mlp.down" in name:
        return "Q6_K"
    return "Q5_K" if "v_proj" in name else "Q4_K"


def mostly_q4_0(name: str) -> str:
    return {"lm_head": "Q6_K", "model.embed_tokens": "Q8_0"}.get(
        name.removesuffix(".weight"), "Q4_1" if "1.mlp.down" in name else "Q4_0"
    )


def folder_of(file: Path, **options: Any) -> Path:
    return Path(resolve_model(ModelConfig(model=str(file), **options)).model or "")


def logits(model: CausalLM) -> torch.Tensor:
    return step(model, new_cache(model), [(some_tokens(40), 0, [4, 2, 6])])


# ---- weights ----


@pytest.mark.parametrize(
    "choose",
    [all_of("F32"), all_of("F16"), all_of("BF16"), all_of("Q4_1"), all_of("Q8_0"), mixed,
     mostly_q4_0],
    ids=["F32", "F16", "BF16", "Q4_1", "Q8_0", "Q4_K_M", "Q4_0"],
)  # fmt: skip
def test_a_llama_is_what_transformers_makes_of_it(
    choose: Choose, llama: Path, tmp_path: Path
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", choose)
    tokens = some_tokens(40)
    with torch.inference_mode(False), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=file.name, dtype=torch.float32
        )
        expected = theirs(torch.tensor([tokens])).logits[0]
    model = load(folder_of(file))
    found = step(model, new_cache(model), [(tokens, 0, [4, 2, 6])])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("F16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mixtral", "qwen3-moe"])
def test_other_architectures(name: str, kind: str, tmp_path: Path) -> None:
    file = write_gguf(MODELS / name, tmp_path / "a.gguf", all_of(kind), tmp_path / "dense")
    ours, theirs = load(folder_of(file)), load(tmp_path / "dense")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


def test_shared_experts(tmp_path: Path) -> None:
    """A GGUF of Qwen2-MoE has experts in all layers."""
    source = tmp_path / "source"
    config = json.loads((MODELS / "qwen2-moe" / "config.json").read_text())
    sizes = {**config, "mlp_only_layers": [], "layer_types": None, "num_hidden_layers": 2}
    tiny_folder(source, Qwen2MoeConfig(**sizes), scale=0.2)
    file = write_gguf(source, tmp_path / "a.gguf", all_of("Q8_0"), tmp_path / "dense")
    ours, theirs = load(folder_of(file)), load(tmp_path / "dense")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choose", [all_of("Q8_0"), mostly_q4_0, mixed], ids=["8", "4", "K"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_split_model_equals_the_whole(
    choose: Choose, size: int, llama: Path, tmp_path: Path
) -> None:
    folder = folder_of(write_gguf(llama, tmp_path / "a.gguf", choose))
    whole = split_logits(1, lambda member: load(folder, member))[0]
    for part in split_logits(size, lambda member: load(folder, member)):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_blocks_of_32_stay_packed(llama: Path, tmp_path: Path) -> None:
    """And plan counts their bytes; a projection of another type is dequantized."""
    folder = folder_of(write_gguf(llama, tmp_path / "a.gguf", mostly_q4_0))
    model, spec = load(folder), ModelSpec.from_folder(folder)
    first, last = (layer.mlp.down_proj.weight for layer in model.layers)
    assert isinstance(first, GroupedWeight) and not isinstance(last, GroupedWeight)
    assert first.matrices[0].values.nbytes == 512 * 256 // 2
    assert isinstance(model.layers[1].attention.qkv_proj.weight, GroupedWeight)
    assert str(spec.stored) == "GGUF Q4_1, Q6_K, Q8_0"
    whole = Stage.whole(spec.num_layers)
    assert Footprint(spec, "float32").weights(whole) == model.weights_bytes


def test_int8_of_a_dequantized_file(llama: Path, tmp_path: Path) -> None:
    folder = folder_of(write_gguf(llama, tmp_path / "a.gguf", mixed, tmp_path / "dense"))
    rounded, expected = (load(each, quantization="int8") for each in (folder, tmp_path / "dense"))
    assert torch.equal(logits(rounded), logits(expected))


def test_rotations_of_llama_3(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    config = LlamaConfig(**{**SIZES, "rope_parameters": rope})
    source = tiny_folder(tmp_path / "source", config)
    with torch.inference_mode(False):
        turned = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq.numpy()
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    factors = (plain / turned).astype(np.float32)
    more = {"rope_freqs.weight": factors}
    file = write_gguf(source, tmp_path / "a.gguf", all_of("F32"), more=more)
    spec, original = (ModelSpec.from_folder(each) for each in (folder_of(file), source))
    assert spec.rope == original.rope
    more = {"rope_freqs.weight": factors[::-1].copy()}
    file = write_gguf(source, tmp_path / "b.gguf", all_of("F32"), more=more)
    with pytest.raises(ConfigError, match="other factors than those of Llama 3"):
        folder_of(file)


def test_the_types_are_those_of_the_package() -> None:
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        assert block_of(kind.name) in (None, sizes)


# ---- llama.cpp ----


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_logits_are_those_of_llama_cpp(name: str, kind: str, tmp_path: Path) -> None:
    """Where weights are quantized it rounds activations to 8 bits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    file = write_gguf(MODELS / name, tmp_path / "a.gguf", all_of(kind))
    theirs = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False)
    theirs.eval(tokens := some_tokens(40))
    expected = torch.tensor(theirs.scores[: len(tokens)])
    model = load(folder_of(file))
    found = step(model, new_cache(model), [(tokens, 0, [4, 2, 6])])
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < (0.005 if kind.startswith("F") else 0.05)


# ---- tokenizers ----

TEXT = "Once upon a time, in 2024:\n\n  cafés 😀<|im_end|>\tx"


def test_tokenizer_template_and_ends(tmp_path: Path) -> None:
    source = MODELS / "qwen2"
    file = write_gguf(source, tmp_path / "a.gguf", all_of("F32"))
    folder = folder_of(file)
    ours, theirs = map(PreTrainedTokenizerFast.from_pretrained, (folder, source))
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.decode(ours(TEXT)["input_ids"]) == TEXT
    assert ours.chat_template == theirs.chat_template
    assert ModelSpec.from_folder(folder).eos_token_ids == (0, 2)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm"])
def test_pre_tokenizers(pre: str, tmp_path: Path) -> None:
    more = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 1}
    more["tokenizer.ggml.add_bos_token"] = None  # llama-bpe has one nonetheless
    file = write_gguf(MODELS / "qwen2", tmp_path / "a.gguf", all_of("F32"), metadata=more)
    ours = PreTrainedTokenizerFast.from_pretrained(folder_of(file))
    found = ours(TEXT)["input_ids"]
    assert ours.decode(found[pre == "llama-bpe" :]) == TEXT
    assert (found[0] == 1) == (pre == "llama-bpe")
    if pre != "smollm":  # which transformers does not know
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
        assert found[pre == "llama-bpe" :] == theirs(TEXT, add_special_tokens=False)["input_ids"]


def test_another_tokenizer_stands_for_one_that_is_missing(tmp_path: Path) -> None:
    more = dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.tokens"))
    file = write_gguf(MODELS / "qwen2", tmp_path / "a.gguf", all_of("F32"), metadata=more)
    with pytest.raises(ConfigError, match=r"a\.gguf has no tokenizer: .*--tokenizer"):
        folder_of(file)
    folder = folder_of(file, tokenizer=str(MODELS / "qwen2"))
    assert not (folder / "tokenizer.json").exists()


# ---- the cache ----


def test_a_file_has_one_folder_until_it_changes(llama: Path, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(llama, tmp_path / "tiny.Q8_0.gguf", all_of("Q8_0"))
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(folder_of, [file] * 4))
    assert folder.parent == cache / "gguf"
    assert [each.name for each in folder.parent.iterdir() if each.is_dir()] == [folder.name]
    config = resolve_model(ModelConfig(model=str(file)))
    assert config.served_name == "tiny.Q8_0"
    revision = weights_revision(folder)
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(file, copy)
    assert weights_revision(folder_of(copy)) == revision
    write_gguf(llama, file, all_of("Q4_0"))
    assert folder_of(file) != folder
    assert weights_revision(folder_of(file)) != revision


def test_a_cache_of_others_is_refused(llama: Path, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(llama, tmp_path / "a.gguf", all_of("F32"))
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write to .*PDSERVE_CACHE"):
        folder_of(file)


def test_a_file_that_was_cut_since(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "a.gguf", all_of("F32"))
    folder = folder_of(file)
    os.truncate(file, 100_000)
    with pytest.raises(ConfigError, match="has changed since"):
        load(folder)


# ---- refusals ----


def test_incomplete_gguf_files_are_refused(llama: Path, tmp_path: Path) -> None:
    def says(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            folder_of(tmp_path / name)
        assert "\n" not in caught.value.message
        return caught.value.message

    data = write_gguf(llama, tmp_path / "a.gguf", all_of("Q8_0")).read_bytes()
    assert "is not a GGUF file" in says("b.gguf", b"PK" + data[2:])
    assert "is not a GGUF file" in says("c.gguf", b"")
    for length in (4, 20, 30, 1000, 20_000, len(data) - 100):
        assert "is truncated or damaged" in says(f"{length}.gguf", data[:length])
    with pytest.raises(ConfigError, match=r"cannot read the file .*absent\.gguf: No such file"):
        folder_of(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metadata": {"general.architecture": "gemma3"}}, "architecture 'gemma3' are not supp"),
        ({"metadata": {"tokenizer.ggml.pre": "alien"}}, "pre-tokenizer .* 'alien' is not"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer 'bert' is not supported"),
        ({"metadata": {"tokenizer.ggml.merges": ["a"]}}, "its tokenizer cannot be read"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts: join them"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "scaling.type 'longrope'"),
        ({"metadata": {"llama.attention.sliding_window": 128}}, "sliding_window 128 is not"),
        ({"without": "token_embd.weight"}, "lacks the tensor token_embd.weight"),
        ({"more": {"blk.0.ssm_a.weight": np.zeros(4, np.float32)}}, "blk.0.ssm_a.weight is not kn"),
        ({"more": {"blk.0.attn_norm.bias": np.zeros(4, np.int8)}}, "attn_norm.bias is of type I8"),
    ],
)
def test_files_that_cannot_be_served(
    given: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    file = write_gguf(llama, tmp_path / "a.gguf", all_of("F32"), **given)
    with pytest.raises(ConfigError, match=message):
        folder_of(file)


def test_a_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "a.gguf", all_of("F32"), without="blk.1.ffn_up.weight")
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder_of(file))
