"""Which decoders of transformers run on the paged cache, and whether they say the same.

For every class that the installed transformers has for causal language models it makes a tiny
checkpoint (seeded random weights, float32) and compares with transformers: the log-probabilities of
a prompt of 60 tokens, in chunks over the cache, and 16 greedy tokens where the best two logits are
apart. Those of the transformers path run in other ways too: on two tensor-parallel ranks, as two
stages, with experts spread over two ranks, with a LoRA adapter, and with weights rounded to int8.
Each class has a process of its own. Writes `common/model/models.json`, from which
`pdserve models` and docs/models.md are made:

    python tests/models/sweep.py [model_type …]
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

FILE = Path(__file__).parents[2] / "common" / "model" / "models.json"
LIMIT_S = 180  # of CPU time that a class may take, so that a busy machine changes no result
STUCK_S = 20 * LIMIT_S  # of wall-clock time
VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "use_sliding_window": True,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    # GPT-2 and others before Llama
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "ffn_dim": 96,
    # encoders with a decoder
    "d_model": 64,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "max_target_positions": 256,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "init_std": 0.2,  # BART and others
    "is_decoder": True,  # BERT and others
}


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
MIXED = ["linear_attention", "full_attention"] * 2
TWICE = {"rope_type": "default", "rope_theta": 10000.0}
BOTH = ["sliding_attention", "full_attention"]
INDEXED = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk_freq": 1}
CASES: dict[str, dict[str, Any]] = {
    "axk2": INDEXED,
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
    "hy_v4": INDEXED,
    "cohere_compass_text": {
        "rope_parameters": {"sliding_attention": TWICE, "full_attention": TWICE}
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "bailing_hybrid": {"layer_types": MIXED, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "bloom": {"seq_length": 256},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": BOTH * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "activation_sparsity_pattern": [0.9] + [0.0] * 5,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": BOTH * 3,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "longcat_flash": {
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": 32, "floor_scale": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "num_layers": 4,
        "num_heads": 4,
        "window_size": 24,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**MAMBA, "layer_types": MIXED, "shared_intermediate_size": 96},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "layer_types": MIXED,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "lara_mini": {
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "chunk_size": 16,
        "initializer_range": 0.1,  # else transformers' own cache says otherwise than no cache
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "gemma4_assistant": {
        "text_config": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "mpt": {"n_heads": 4, "n_layers": 4, "d_model": 64, "max_seq_len": 256},
    "xglm": {"attention_heads": 4, "num_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    CASES[name] = {"rope_parameters": rope, "use_sliding_window": False}
CASES["gemma4_unified_text"] = CASES["gemma4_text"]
CASES["inkling2_loop_text"] = CASES["inkling2_text"]
"""Sizes that a class needs beyond `SIZES`."""
SEEN = {
    "patch_size": 4,
    "image_size": 16,
    "num_channels": 3,
}
"""Sizes of towers, which only take part where there are images."""


def tiny(kind: Any) -> Any:
    """Returns a config of class `kind` with small sizes, of those that it has. Its layers are of
    all types that the default has."""
    default = _default(kind)
    settings = {name: size for name, size in SIZES.items() if _takes(default, name)}
    if "kv_lora_rank" in settings:
        settings = {
            k: v for k, v in settings.items() if k not in ("head_dim", "num_key_value_heads")
        }
    kinds = list(dict.fromkeys(_get(default, "layer_types") or ()))
    if kinds == ["full_attention"] and "sliding_window" in settings:
        kinds.append("sliding_attention")
    if kinds and "layer_types" not in kind.attribute_map and not _is_property(kind, "layer_types"):
        layers = SIZES["num_hidden_layers"]
        settings["layer_types"] = (kinds * layers)[:layers]
    if hasattr(default, "patch_size"):
        settings.update({name: size for name, size in SEEN.items() if _takes(default, name)})
    for name in getattr(kind, "sub_configs", None) or ():
        part = _get(default, name)
        if isinstance(part, PretrainedConfig):
            settings[name] = tiny(type(part)).to_dict()
    return kind(**settings | CASES.get(kind.model_type, {}))


def _default(kind: Any) -> Any:
    try:
        return kind()
    except Exception:  # it needs what `CASES` says (Gemma 4 Assistant)
        return kind(**CASES[kind.model_type])


def _takes(default: Any, name: str) -> bool:
    kind = type(default)
    if name in kind.attribute_map or _is_property(kind, name):
        return False
    unset = ("head_dim", "num_key_value_heads", "q_lora_rank")
    return hasattr(kind, name) and (_get(default, name) is not None or name in unset)


def _is_property(kind: Any, name: str) -> bool:
    return isinstance(getattr(kind, name, None), property)


def _get(config: Any, name: str) -> Any:
    """Returns an attribute; if its layers differ in it the class's own."""
    try:
        return getattr(config, name, None)
    except Exception:  # of a class whose layers differ in it
        return getattr(type(config), name, None)


def make(kind: Any, model_class: Any, folder: Path) -> Any:
    """Writes a tiny checkpoint with random weights; returns the model."""
    import torch

    torch.manual_seed(0)
    reference = model_class(tiny(kind)).to(torch.float32).eval()
    reference.save_pretrained(folder)
    _name_as_on_the_hub(folder)
    inner = getattr(reference, "language_model", None)
    # Llama 4's outer class has no output without images.
    return inner if hasattr(inner, "lm_head") else reference


def compare(kind: Any, model_class: Any, split: bool) -> dict[str, Any]:
    """Returns the row of one class: how it is served, or why not; with `split`, on what else than
    one rank."""
    import torch

    from pdserve.common.core.errors import ConfigError
    from pdserve.common.model.implementation import read_spec

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            reference = make(kind, model_class, folder)
        except Exception as error:
            return _without_model(kind, model_class, folder, _first(error))
        try:
            spec = read_spec(folder, "auto", {})
            tokens, expected = greedy(reference)
            found = logits(folder, spec, tokens)
        except ConfigError as error:
            return _refused(error, folder)
        if why := difference(found, expected):
            return {"result": "differs", "why": why}
        exact = []
        for what, check in WAYS.items() if spec.impl != "native" and split else ():
            try:
                why = check(folder, spec, tokens, reference)
            except ConfigError:
                continue  # it is refused
            except Exception as error:
                why = _first(error)
            if why:
                print(f"{spec.architecture}: {what}: {why}", file=sys.stderr)
            else:
                exact.append(what)
    return {
        "result": "exact",
        "path": spec.impl,
        "kv": _kv(spec),
        **({"with": ", ".join(exact)} if exact else {}),
    }


# ---- other ways to run a class ----


def _two_ranks(folder: Path, spec: Any, tokens: Any, reference: Any) -> str:
    return difference(logits(folder, spec, tokens, tp=2), _right(reference, tokens))


def _two_stages(folder: Path, spec: Any, tokens: Any, reference: Any) -> str:
    return difference(logits(folder, spec, tokens, pp=2), _right(reference, tokens))


def _spread(folder: Path, spec: Any, tokens: Any, reference: Any) -> str:
    spec.validate_expert_parallel(2, 2)
    return difference(logits(folder, spec, tokens, tp=2, spread=True), _right(reference, tokens))


def _with_adapter(folder: Path, spec: Any, tokens: Any, reference: Any) -> str:
    import copy

    import torch
    from safetensors.torch import save_file

    from pdserve.common.core.lora import AdapterFile

    rank, tensors, changed = 2, {}, copy.deepcopy(reference)
    for name, module in named_linears(changed, spec).items():
        outputs, inputs = next(each[1:] for each in spec.linears if each[0] == name)
        a, b = torch.randn(rank, inputs), 0.03 * torch.randn(outputs, rank)
        tensors |= dict(zip(AdapterFile.tensor_names(name), (a, b), strict=True))
        with torch.no_grad():
            _as_linear(module).add_(b @ a)
    adapter = folder / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    found = logits(folder, spec, tokens, adapter=adapter)
    return difference(found, _right(changed, tokens))


def _rounded(folder: Path, spec: Any, tokens: Any, reference: Any) -> str:
    found = logits(folder, spec, tokens, quantization="int8")
    return difference(found, _right(rounded_model(reference, spec), tokens))


WAYS = {
    "TP": _two_ranks,
    "PP": _two_stages,
    "EP": _spread,
    "LoRA": _with_adapter,
    "int8": _rounded,
}
"""Return what differs from `reference`."""


def _right(model: Any, tokens: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(tokens[None], use_cache=False).logits[0]


def named_linears(model: Any, spec: Any) -> dict[str, Any]:
    """Returns the modules of transformers' model that adapters may change, by the spec's names."""
    from pdserve.common.core.towers import text_name

    modules = dict(model.named_modules())
    by_text = {text_name(name) or name: module for name, module in modules.items()}
    return {name: modules.get(name) or by_text[name] for name, _, _ in spec.linears}


def _as_linear(module: Any) -> Any:
    """Returns its matrix `[out, in]`."""
    from transformers.pytorch_utils import Conv1D

    return module.weight.t() if isinstance(module, Conv1D) else module.weight


def rounded_model(model: Any, spec: Any) -> Any:
    """Returns a copy of transformers' model of which the weights are those that `--quantization
    int8` rounds to."""
    import copy

    import torch

    from pdserve.common.model.hf.experts import experts_of, matrices_of
    from pdserve.common.model.weights import channel_scales, rounded

    model = copy.deepcopy(model)
    heads = [each for each in [model.get_output_embeddings()] if each is not None]
    with torch.no_grad():
        for module in (*named_linears(model, spec).values(), *heads):
            weight = _as_linear(module)
            scales = channel_scales(weight, torch.float32)
            weight.copy_(rounded(weight, scales) * scales[:, None])
        for module in experts_of(model).values():
            for _, stacked in matrices_of(module):
                for each in stacked:
                    weight = each.t() if module.is_transposed else each
                    scales = channel_scales(weight, torch.float32)
                    weight.copy_(rounded(weight, scales) * scales[:, None])
    return model


def _without_model(kind: Any, model_class: Any, folder: Path, why: str) -> dict[str, Any]:
    """Returns the row of a class of which no tiny model can be made: is its own config refused?"""
    from pdserve.common.core.errors import ConfigError
    from pdserve.common.model.implementation import read_spec

    config = _default(kind)
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    try:
        read_spec(folder, "auto", {})
    except ConfigError as error:
        return _refused(error, folder)
    return {"result": "not compared", "why": f"no tiny model: {why}"}


def _refused(error: Any, folder: Path) -> dict[str, Any]:
    return {"result": "refused", "why": error.message.replace(str(folder), "the folder")}


def _kv(spec: Any) -> str:
    from pdserve.common.model.hf.indexers import INDEXERS

    if spec.latent:
        return "latent"
    if any(group.state for group in spec.kv_groups):
        return "states"
    if spec.family in INDEXERS:
        return "indexed"
    if any(group.planes == 1 for group in spec.kv_groups):
        return "latent"
    return "windows" if any(group.window for group in spec.kv_groups) else "full"


def logits(
    folder: Path,
    spec: Any,
    tokens: Any,
    tp: int = 1,
    pp: int = 1,
    spread: bool = False,
    adapter: Path | None = None,
    kernels: str = "torch",
    **options: Any,
) -> Any:
    """Returns the logits of `tokens`, the first 60 of them a prompt in chunks, by `tp` ranks, which
    are threads, or `pp` stages; experts may be `spread` over the ranks. `options` are a
    `ModelConfig`'s. Each step has a token of another sequence before them."""
    import torch

    from crowd import Crowd
    from pdserve.common.config.engine import ModelConfig
    from pdserve.common.distributed.all2all import Replicated
    from pdserve.common.distributed.group import GroupCoordinator
    from pdserve.common.model.attention import AttentionBatch
    from pdserve.common.model.device import choose_kernels
    from pdserve.common.model.implementation import load_decoder
    from pdserve.common.model.sharding import Sharding
    from pdserve.common.model.stages import pipeline_stages

    def work(member: Any) -> Any:
        all2all = Replicated(member if spread else GroupCoordinator())
        cpu = torch.device("cpu")
        chosen = choose_kernels(kernels, cpu)
        sharding = Sharding(member, cpu, torch.float32, all2all, kernels=chosen)
        config = ModelConfig(model=str(folder), **options)
        stages = []
        for stage in pipeline_stages(spec.num_layers, pp):
            model = load_decoder(spec, config, sharding, stage)
            caches = []
            for group in spec.kv_groups:
                (start, end), (first, last) = (
                    group.head_range(member.rank, tp),
                    group.layers_between(stage.start, stage.end),
                )
                size = (last - first, group.planes, 16, end - start, *group.page(16))
                caches.append(torch.zeros(size))
            stages.append((model, caches))

        def step(other: int, start: int, end: int) -> Any:
            tables = [list(range(8, 16)), list(range(8))]
            batch = [AttentionBatch([1, end - start], [other, start], tables, 16)]
            positions = torch.tensor([other, *range(start, end)])
            hidden = tokens[positions]
            for model, caches in stages:
                contexts = model.prepare(batch * len(spec.kv_groups))
                lora = None if adapter is None else _of_step(model, adapter, end - start)
                hidden = model.forward(hidden, positions, contexts, caches, lora)
            return model.compute_logits(hidden)[1:]

        cuts = [0, 30, 59, *range(60, len(tokens) + 1)]
        return torch.cat([step(n, *cut) for n, cut in enumerate(pairwise(cuts))])

    found: list[Any] = Crowd(tp).run(work)
    return found[-1]


def _of_step(model: Any, adapter: Path, count: int) -> Any:
    """Returns the adapter for a step with a row of none before `count` rows of it."""
    import torch

    from pdserve.common.core.lora import read_adapter
    from pdserve.common.model.lora import StepLoRA, load_pairs

    pairs = load_pairs(model, read_adapter(adapter, model.spec, 16))
    return StepLoRA([(pairs, torch.arange(1, count + 1))])


def greedy(reference: Any, count: int = 16) -> tuple[Any, Any]:
    """Returns a prompt of 60 tokens with `count` greedy ones after it, and their logits."""
    import torch

    tokens = torch.randint(3, VOCAB, (60,))
    with torch.inference_mode():
        for _ in range(count):
            expected = reference(tokens[None], use_cache=False).logits[0]
            tokens = torch.cat((tokens, expected[-1].argmax()[None]))
        return tokens, reference(tokens[None], use_cache=False).logits[0]


def difference(found: Any, expected: Any) -> str:
    """Returns how log-probabilities or greedy tokens after the prompt differ; empty if they do
    not."""
    off = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
    if not off < 1e-3:
        return f"log-probabilities differ by {off:.2g}"
    best = expected.topk(2, dim=-1).values
    wrong = (best[:, 0] - best[:, 1] > 1e-3) & (found.argmax(-1) != expected.argmax(-1))
    return f"another token after {int(wrong.nonzero()[0])}" if wrong[59:].any() else ""


def _name_as_on_the_hub(folder: Path) -> None:
    """Repairs names of layers that transformers writes other than it reads them (Kimi K2.5,
    Qianfan-OCR), and the name of a class that it runs as another (EXAONE)."""
    from safetensors.torch import load_file, save_file

    file, path = folder / "model.safetensors", folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "exaone":
        path.write_text(json.dumps({**config, "architectures": ["ExaoneForCausalLM"]}))
    weights = load_file(file)
    wrong = re.compile(r"^language_model\.model\.(blocks|encoder\.layers)\.")
    if any(map(wrong.match, weights)):
        right = "language_model.model.layers."
        save_file({wrong.sub(right, n): t for n, t in weights.items()}, file, {"format": "pt"})


def _first(error: Exception) -> str:
    from pdserve.common.model.hf.class_config import first_line

    return first_line(error)


def names() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from pdserve.common.core.towers import WITH_TOWERS

    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING_NAMES)
    return sorted(causal | WITH_TOWERS)


def classes_of(name: str) -> tuple[Any, Any]:
    """Returns the classes of a model type's config and model."""
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    kind = CONFIG_MAPPING[name]
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None)
    model_class = model_class or MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    return kind, model_class[0] if isinstance(model_class, tuple) else model_class


def one(name: str, split: bool = True) -> dict[str, Any]:
    """Compares one class in this process: see `compare`."""
    kind, model_class = classes_of(name)
    try:
        row = compare(kind, model_class, split)
    except Exception as error:
        row = {"result": "not compared", "why": _first(error)}
    return {"class": model_class.__name__, **row}


def run(name: str) -> dict[str, Any]:
    """Compares one class in a process of its own, a fork of this one."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        sender.send(one(name))

    child = fork.Process(target=work, daemon=True)
    child.start()
    sender.close()
    try:
        if receiver.poll(STUCK_S):
            return dict(receiver.recv())
    except EOFError:
        pass
    finally:
        child.kill()
        child.join()
    return {"class": "", "result": "not compared", "why": "it took too long, or crashed"}


def main() -> None:
    from pdserve.common.model import implementation
    from pdserve.common.model.hf import model

    assert implementation and model  # imported before the forks
    wanted = sys.argv[1:] or names()
    with ThreadPoolExecutor(2) as pool:
        rows = dict(zip(wanted, pool.map(run, wanted), strict=True))
    known = json.loads(FILE.read_text()) if FILE.exists() and sys.argv[1:] else {}
    FILE.write_text(json.dumps(dict(sorted({**known, **rows}.items())), indent=1) + "\n")
    results = [row["result"] for row in rows.values()]
    for result in ("exact", "refused", "differs", "not compared"):
        print(f"{result}: {results.count(result)}")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))
    main()
