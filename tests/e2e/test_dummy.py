"""`--load-format dummy`: a config.json alone is enough to run a cluster, for benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from warm import WarmCluster

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "dtype": "bfloat16",
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def test_random_weights_from_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    dummy = {"load_format": "dummy"}
    with WarmCluster(tmp_path, 0, 1, router=dummy, **dummy) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.wait_nodes()
        whole = cluster.complete("héllo", max_tokens=12, ignore_eos=True)
        assert whole["usage"]["prompt_tokens"] == len("héllo".encode())
        assert whole["usage"]["completion_tokens"] == 12
        # Both roles drew the same weights: what one computes continues what the other did.
        chat = cluster.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
        assert chat.status_code == 200, chat.text
        again = cluster.complete("héllo", max_tokens=12, ignore_eos=True)
        assert again["choices"][0]["text"] == whole["choices"][0]["text"]
        assert "has no tokenizer" in cluster.log()
        cluster.wait_idle()
