"""LoRA adapters in the decoder, against peft and against models that they are merged into."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from adapters import ALL, make_adapter
from benchmarks.quantized_folder import Scheme, quantize_folder
from crowd import Crowd
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.lora import AdapterFile, read_adapter
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.engine.messages import LOADED, DropAdapter, LoadAdapter, encode_adapter_call
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.hf.model import TransformersModel
from pdserve.common.model.implementation import load_decoder, read_spec
from pdserve.common.model.layers import LoRA
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import Footprint
from pdserve.common.worker import adapters as worker_adapters
from pdserve.common.worker.adapters import AdapterExtension, RankAdapters
from pdserve.common.worker.input_batch import StepSequence
from slow_quantization import dequantized_folder
from sweep import tiny
from thinned import only, slow
from tiny_engine import BLOCK_SIZE, load, new_cache, some_tokens

pytestmark = pytest.mark.usefixtures("inference")

LLAMA = MODELS / "llama-gqa"


def logits(model: CausalLM, parts: list[list[int]], lora: LoRA | None) -> list[torch.Tensor]:
    """Returns the logits of all tokens of prompts that are in one step."""
    lengths = [len(part) for part in parts]
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(parts))]
    batch = AttentionBatch(lengths, [0] * len(parts), tables, BLOCK_SIZE)
    tokens = torch.tensor([token for part in parts for token in part])
    positions = torch.tensor([i for length in lengths for i in range(length)])
    caches = new_cache(model)
    contexts = model.prepare([batch] * len(caches))
    hidden = model.forward(tokens, positions, contexts, caches, lora)
    return list(model.compute_logits(hidden).split(lengths))


def of_peft(model: Path, adapter: Path, tokens: list[int]) -> torch.Tensor:
    import peft  # not by each process that collects this file: it takes half a second

    with torch.inference_mode(False), torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
        return adapted(torch.tensor([tokens])).logits[0].clone()


def loaded(model: CausalLM, *folders: Path) -> tuple[RankAdapters, list[str]]:
    adapters = RankAdapters(model, max_rank=16)
    digests = [read_adapter(each, model.spec, 16).digest for each in folders]
    for digest, folder in zip(digests, folders, strict=True):
        load_it = LoadAdapter(digest, str(folder))
        adapters.serve(load_it)
        wait(adapters._loading.values())
        assert adapters.serve(load_it) == LOADED
    return adapters, digests


def of_step(adapters: RankAdapters, parts: list[list[int]], digests: list[str]) -> LoRA | None:
    sequences = [
        StepSequence(i, tuple(part), 0, (), adapter=digest)
        for i, (part, digest) in enumerate(zip(parts, digests, strict=True))
    ]
    return adapters.of_step(sequences)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-gqa", {}),
        ("qwen2", {"targets": ("q_proj", "v_proj"), "rank": 8, "use_rslora": True}),
        ("qwen3", {"targets": ("o_proj", "down_proj", "up_proj"), "rank": 1, "lora_alpha": 3}),
        ("mixtral", {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")}),
    ],
)
def test_logits_equal_those_of_peft(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", MODELS / name, seed=1, **options)
    model, tokens = load(MODELS / name), some_tokens(40)
    adapters, digests = loaded(model, folder)
    found = logits(model, [tokens], of_step(adapters, [tokens], digests))[0]
    expected = of_peft(MODELS / name, folder, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert (found - logits(model, [tokens], None)[0]).abs().max() > 1


@pytest.mark.parametrize(
    "scheme",
    [Scheme("awq", group_size=64), slow(Scheme("gptq", desc_act=True))],
    ids=["awq", "gptq"],
)
def test_an_adapter_of_4_bit_weights_equals_that_of_their_values(
    scheme: Scheme, tmp_path: Path
) -> None:
    """Whole, and split over two ranks."""
    folder, tokens = make_adapter(tmp_path / "a", LLAMA, seed=1), some_tokens(40)
    quantized = quantize_folder(LLAMA, tmp_path / "quantized", scheme)
    dense = dequantized_folder(quantized, tmp_path / "dense", scheme)

    def work(member: Any = None) -> torch.Tensor:
        model = load(quantized, member)
        adapters, digests = loaded(model, folder)
        return logits(model, [tokens], of_step(adapters, [tokens], digests))[0]

    expected = of_peft(dense, folder, tokens)
    for found in [work(), *Crowd(2).run(work)]:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert (expected - of_peft(LLAMA, folder, tokens)).abs().max() > 1e-2


def test_rows_of_several_adapters_are_in_one_step(tmp_path: Path) -> None:
    """Each has its own adapter's part, and those of the model alone none."""
    folders = [make_adapter(tmp_path / str(i), LLAMA, seed=i, rank=2 + i) for i in range(2)]
    model = load(LLAMA)
    adapters, (first, second) = loaded(model, *folders)
    parts = [some_tokens(20, seed=i) for i in range(6)]
    names = [first, "", second, first, "", second]
    together = logits(model, parts, of_step(adapters, parts, names))
    for part, name, found in zip(parts, names, together, strict=True):
        alone = logits(model, [part], of_step(adapters, [part], [name]))[0]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    assert of_step(adapters, parts[:1], [""]) is None


@pytest.mark.parametrize(
    ("name", "size", "quantization"),
    [("llama-gqa", 4, None), ("qwen3", 2, None), ("mixtral", 2, None), ("llama-gqa", 2, "int8")],
)
def test_a_split_adapter_equals_the_whole(
    name: str, size: int, quantization: str | None, tmp_path: Path
) -> None:
    """Four ranks share two KV heads. The first rank's part is as large as the plan says."""
    folder, tokens = make_adapter(tmp_path / "a", MODELS / name, seed=3), some_tokens(20)

    def work(member: Any = None) -> torch.Tensor:
        model = load(MODELS / name, member, quantization=quantization)
        adapters, digests = loaded(model, folder)
        if member is not None and member.rank == 0:
            pairs = adapters._pairs[digests[0]].values()
            footprint = Footprint(model.spec, "float32", size)
            held = sum(pair.a.tensor.nbytes + pair.b.tensor.nbytes for pair in pairs)
            assert footprint.adapters(model.stage, 1, 4, 0) == held
        return logits(model, [tokens], of_step(adapters, [tokens], digests))[0]

    for found in Crowd(size).run(work):
        torch.testing.assert_close(found, work(), rtol=1e-4, atol=1e-4)


LIKE_GPT2 = {"c_attn", "c_proj", "c_fc"}
CLASSES = {
    "gpt2": LIKE_GPT2,  # matrices [in, out]
    "opt": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
    "gemma3_text": set(ALL),
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
}


@pytest.mark.parametrize(
    ("name", "recorded"),
    only(
        [*((name, True) for name in CLASSES), ("gpt2", False), ("phi3", False)],
        [("gpt2", True), ("phi3", False)],
    ),
)
def test_classes_of_transformers_have_adapters(
    name: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank and on two, beside rows that have none; those of a node that knows the sizes and
    of a router that does not are the same."""
    if not recorded:
        monkeypatch.setattr(TransformersModel, "record", lambda self: None)
    torch.manual_seed(0)
    sizes = tiny(CONFIG_MAPPING[name])
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(sizes).save_pretrained(tmp_path)
    targets = tuple(sorted(CLASSES[name]))
    folder = make_adapter(tmp_path / "a", tmp_path, seed=1, targets=targets)
    config(fan_in_fan_out=CLASSES[name] is LIKE_GPT2)(folder)
    spec, parts = read_spec(tmp_path, "auto", {}), [some_tokens(40), some_tokens(20, seed=1)]
    parts = [[token % sizes.vocab_size for token in part] for part in parts]
    file = read_adapter(folder, spec, 16)
    assert {each.rpartition(".")[2] for each in file.modules} == CLASSES[name]
    assert read_adapter(folder, None, 16).digest == file.digest

    def work(member: Any) -> list[torch.Tensor]:
        model: Any = load_decoder(
            spec,
            ModelConfig(model=str(tmp_path)),
            Sharding(member, torch.device("cpu"), torch.float32),
            Stage.whole(spec.num_layers),
        )
        adapters, digests = loaded(model, folder)
        return logits(model, parts, of_step(adapters, parts, [*digests, ""]))

    expected = of_peft(tmp_path, folder, parts[0])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor(parts[1:])).logits[0]
    for size in (1, 2):
        for found in Crowd(size).run(work):
            torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(found[1], plain, rtol=1e-3, atol=1e-3)


def test_calls_load_and_drop_and_others_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a file is read."""
    folder = make_adapter(tmp_path / "a", LLAMA, seed=0)
    model, tokens = load(LLAMA), some_tokens(4)
    digest, may_read = read_adapter(folder, model.spec, 16).digest, threading.Event()

    def read(*args: Any) -> AdapterFile:
        may_read.wait()
        return read_adapter(*args)

    monkeypatch.setattr(worker_adapters, "read_adapter", read)
    adapters = RankAdapters(model, max_rank=16)
    extension = AdapterExtension(adapters, None)
    load_it, drop_it = encode_adapter_call(LoadAdapter(digest, str(folder))), DropAdapter(digest)
    assert extension.handle_at_once(load_it) is None
    assert extension.handle(load_it) == extension.handle(load_it) == b""
    with pytest.raises(NodeError, match="no extension"):
        extension.handle(b"another's")
    with pytest.raises(NodeError, match="is not loaded") as caught:
        of_step(adapters, [tokens], [digest])
    assert caught.value.code == "ADAPTER_NOT_LOADED"
    may_read.set()
    wait(adapters._loading.values())
    assert extension.handle(load_it) == extension.handle(load_it) == LOADED
    assert of_step(adapters, [tokens], [digest]) is not None
    assert extension.handle(encode_adapter_call(drop_it)) == b""
    with pytest.raises(NodeError, match="is not loaded"):
        of_step(adapters, [tokens], [digest])
    wrong = encode_adapter_call(LoadAdapter("0" * 32, str(folder)))
    extension.handle(wrong)
    wait(adapters._loading.values())
    with pytest.raises(ConfigError, match="differs on this host"):
        extension.handle(wrong)
    assert extension.handle(wrong) == b""  # another try
    extension.close(1.0)


# ---- files ----


def config(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def weights(change: Any) -> Any:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return rewrite


def raw(name: str, content: bytes | None) -> Any:
    def rewrite(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return rewrite


Q_A, Q_B = AdapterFile.tensor_names("model.layers.0.self_attn.q_proj")
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (config(use_dora=True), "sets use_dora, which is not supported"),
        (config(modules_to_save=["lm_head"]), "sets modules_to_save"),
        (config(rank_pattern={"q_proj": 2}), "sets rank_pattern"),
        (config(something_new={"a": 1}), "sets something_new"),
        (config(bias="all"), "biases are not supported"),
        (config(peft_type="IA3"), "peft_type is 'IA3'"),
        (config(peft_type="x" * 10_000), r"more characters\), not 'LORA'"),
        (config(init_lora_weights="pissa"), "has changed the model's own weights"),
        (config(init_lora_weights=["a"]), "has changed the model's own weights"),
        (config(r=17), "rank 17 is more than --max-lora-rank 16"),
        (config(r=True), "r must be a whole number"),
        (config(r=3), r"has the shape \[4, 128\], not \[3, 128\]"),
        (config(lora_alpha="8"), "lora_alpha must be a number"),
        (config(lora_alpha=float("inf")), "lora_alpha must be a number"),
        (raw("adapter_config.json", b"[]"), "does not hold a JSON object"),
        (raw("adapter_config.json", b"{"), "is not JSON"),
        (raw("adapter_config.json", b"[" * 100_000), "is not JSON"),
        (raw("adapter_config.json", None), "adapter_config.json is missing"),
        (raw(WEIGHTS, None), "only safetensors weights are read"),
        (raw(WEIGHTS, b"\x80\x02"), "is not a safetensors file"),
        (raw(WEIGHTS, b"\xff" * 64), "is not a safetensors file"),
        (raw(WEIGHTS, b"\x02" + b"\0" * 7 + b"[]"), "is not a safetensors file"),
        (raw(WEIGHTS, b"\x02" + b"\0" * 7 + b"{}"), "it has no tensors"),
        (weights(lambda t: t.pop(Q_B)), "it lacks .*q_proj.lora_B"),
        (weights(lambda t: t.update({Q_A: t[Q_A].double()})), "has the dtype F64"),
        (
            weights(lambda t: t.update({"lm_head.lora_A.weight": t[Q_A].clone()})),
            "it has lm_head.lora_A",
        ),
        (weights(lambda t: t.update({Q_A.replace("0", "9"): t[Q_A].clone()})), "in 4 layers"),
    ],
)
def test_invalid_adapters_are_refused(spoil: Any, says: str, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", LLAMA, seed=0)
    spoil(folder)
    with pytest.raises(ConfigError, match=says) as caught:
        read_adapter(folder, ModelSpec.from_folder(LLAMA), max_rank=16)
    assert str(folder) in caught.value.message


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_that_a_model_with_towers_gives(prefix: str, tmp_path: Path) -> None:
    """They are its text model's; a module that is named twice is refused."""
    plain, other = (make_adapter(tmp_path / name, LLAMA, seed=0) for name in "ab")
    tensors = load_file(other / WEIGHTS)
    renamed = {
        name.replace("model.model.layers", f"model.{prefix}layers"): each
        for name, each in tensors.items()
    }
    save_file(renamed, other / WEIGHTS)
    model, tokens = load(LLAMA), some_tokens(20)
    found = []
    for folder in (plain, other):
        adapters, digests = loaded(model, folder)
        found.append(logits(model, [tokens], of_step(adapters, [tokens], digests))[0])
    assert torch.equal(*found)
    twice = {name: tensors[name].clone() for name in (Q_A, Q_B)}
    save_file({**renamed, **twice}, other / WEIGHTS)
    with pytest.raises(ConfigError, match="it has base_model"):
        read_adapter(other, model.spec, 16)


def test_a_file_is_as_long_as_it_says(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", LLAMA, seed=0)
    path = folder / WEIGHTS
    whole = path.read_bytes()
    for spoiled in (whole[:-1], whole + b"\0"):
        path.write_bytes(spoiled)
        with pytest.raises(ConfigError, match="another size than its header says"):
            read_adapter(folder, ModelSpec.from_folder(LLAMA), max_rank=16)


def test_an_adapter_s_identity_is_its_computation(tmp_path: Path) -> None:
    """The same copied is the same; another scale, or one number, is another adapter."""
    spec = ModelSpec.from_folder(LLAMA)
    folder = make_adapter(tmp_path / "a", LLAMA, seed=0)
    copies = [Path(shutil.copytree(folder, tmp_path / str(i))) for i in range(3)]
    config(base_model_name_or_path="elsewhere")(copies[0])
    config(lora_alpha=9)(copies[1])
    weights(lambda t: t[Q_A].view(-1)[:1].add_(0.01))(copies[2])
    first, same, *others = [read_adapter(each, spec, 16).digest for each in (folder, *copies)]
    assert first == same and len({first, *others}) == 3
