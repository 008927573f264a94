"""The parser reads vLLM's flags, forms of values, files and variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.config.cluster import ClusterConfig, PlanConfig
from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.config.options import with_values
from pdserve.common.config.router import RouterConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError

CLASSES = (ClusterConfig, RouterConfig, WorkerNodeConfig)


def load(
    cls: type, *argv: str, env: Mapping[str, str] | None = None, word: str | None = None
) -> tuple[Any, list[str]]:
    """The config, and the lines for the log."""
    said: list[str] = []
    config = parse(
        cls, prog="pdserve test", argv=argv, environ=env or {}, word=word, say=said.append
    )
    return config, said


def refusal(
    capsys: pytest.CaptureFixture[str],
    *argv: str,
    cls: type = ClusterConfig,
    env: Mapping[str, str] | None = None,
) -> str:
    with pytest.raises(SystemExit) as ended:
        load(cls, *argv, env=env)
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err.removeprefix("pdserve test: error: ").partition(" (see ")[0]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-chunked-prefill"],
        ["--enable_chunked_prefill", "True"],
        ["--enable-chunked-prefill=true"],
        ["--disable-log-stats"],
        ["--disable-log-requests"],
        ["--enable-log-requests"],
        ["--no-enable-log-requests"],
        ["--trust-remote-code"],
        ["--trust-remote-code", "false"],
        ["--swap-space", "4"],
        ["--guided-decoding-backend", "xgrammar"],
        ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": false}'],
        ["--structured-outputs-config.backend", "guidance"],
        ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'],
        ["--limit-mm-per-prompt", "image=0,video=0"],
        ["--enable-prompt-tokens-details"],
        ["--enable-server-load-tracking"],
        ["--enable-request-id-headers"],
        ["--max-parallel-loading-workers=2"],
        ["--compilation-config", '{"level": 3}'],
        ["--compilation-config.level=3"],
        ["-O3"],
        ["-O", "3"],
        ["-cc.mode=3"],
        ["--cpu-offload-gb", "0"],
        ["--nnodes", "1"],
        ["--runner", "generate"],
        ["--numa-bind-nodes", "0", "1"],
        ["--hf-token"],
    ],
    ids=" ".join,
)
def test_a_flag_that_changes_nothing_is_one_line(cls: type, argv: list[str]) -> None:
    config, said = load(cls, *argv)
    assert config == cls()
    (line,) = said
    name = argv[0].partition("=")[0].replace("_", "-")
    assert line.startswith(f"vLLM's {name} ")


def test_a_repeated_flag_is_said_once_and_words_beside_it_stay() -> None:
    argv = ["--swap-space", "4", "org/name", "--enable-chunked-prefill", "--swap-space=8"]
    config, said = load(ClusterConfig, *argv, word="model")
    assert config.engine.model.model == "org/name"
    assert [line.split()[1] for line in said] == ["--swap-space", "--enable-chunked-prefill"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--no-enable-chunked-prefill", "vLLM's --no-enable-chunked-prefill is not available here"),
        ("--enable-chunked-prefill=false", "chunked prefill is always on, so leave it out"),
        ("--uvicorn-log-level info", "vLLM's --uvicorn-log-level is called --log-level here"),
        ("--kv-transfer-config {}x", "is called --kv-connector here"),
        ("--enable-expert-parallel", "is called --expert-parallel-size here"),
        ("--limit-mm-per-prompt image=2", "only the text model of a multimodal checkpoint"),
        ("--limit-mm-per-prompt.image 2", "only the text model of a multimodal checkpoint"),
        ("--ssl-ca-certs /ca.pem", "put a proxy in front"),
        ("--ssl-cert-reqs=2", "put a proxy in front"),
        ("--middleware a:b", "vLLM's --middleware is not available here"),
        ("--hf-token secret", "vLLM's --hf-token is not available here: set HF_TOKEN"),
        ("--structured-outputs-config.disable_any_whitespace true", "a request's"),
        ("-dpn 3", "vLLM's -dpn is not available here"),
        ("--quantization bitsandbytes", "'bitsandbytes' is none of int8, awq, "),
        ("--headless", "start pdserve router on one host"),
        ("--model-path x", "SGLang's --model-path is called --model here"),
        ("--tp 2", "SGLang's --tp is called --tensor-parallel-size here"),
        ("--swap-space 4 stray", "no option takes the word stray"),
    ],
)
def test_a_flag_that_would_change_answers_ends_the_start_in_one_sentence(
    argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *argv.split())
    assert says in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], (False, True)),
        (["--enforce-eager", "true"], (True, True)),
        (["--enforce_eager=False"], (False, True)),
        (["--enable-prefix-caching", "false", "--enforce-eager"], (True, False)),
    ],
)
def test_a_switch_may_have_a_value(argv: list[str], expected: tuple[bool, bool]) -> None:
    config, said = load(ClusterConfig, *argv, "org/name", word="model")
    found = config.engine.compilation.enforce_eager, config.engine.cache.enable_prefix_caching
    assert (found, said) == (expected, [])
    assert config.engine.model.model == "org/name"


def test_values_have_vllm_s_forms(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--kv-cache-dtype", "fp8", "--kv-cache-memory-bytes=4G", "--model-impl", "vllm"]
    config, said = load(ClusterConfig, *argv)
    assert (config.engine.cache.kv_cache_dtype, said) == ("fp8_e4m3", [])
    assert config.engine.cache.kv_cache_memory == "4G"
    assert config.engine.model.model_impl == "native"
    assert load(ClusterConfig, "--enforce-eager=yes")[0].engine.compilation.enforce_eager
    assert "a switch takes true or false, not 'maybe'" in refusal(capsys, "--enforce-eager=maybe")


def test_an_option_of_json_is_given_by_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--hf-overrides.rope_scaling.factor", "4", "--hf_overrides.rope_theta=1e6", "org/name"]
    spoken = [
        "--speculative_config.method",
        "ngram",
        "--speculative-config.num_speculative_tokens=2",
    ]
    config, said = load(ClusterConfig, *argv, *spoken, word="model")
    assert config.engine.model.hf_overrides == {"rope_scaling": {"factor": 4}, "rope_theta": 1e6}
    assert config.engine.speculation.speculative_config["method"] == "ngram"
    assert (config.engine.model.model, said) == ("org/name", [])
    assert "--hf-overrides.x lacks a value" in refusal(capsys, "--hf-overrides.x")
    both = refusal(capsys, "--hf-overrides={}", "--hf-overrides.x", "1")
    assert "--hf-overrides is given whole and by keys: choose one form" in both
    clash = refusal(capsys, "--hf-overrides.x", "1", "--hf-overrides.x.y", "1")
    assert "--hf-overrides.x.y" in clash


@pytest.mark.parametrize(
    "argv", ["org/name --cuda-graph-sizes 1 2 4", "--cuda-graph-sizes=1 2 4 x"]
)
def test_numbers_with_spaces_between_are_one_list(argv: str) -> None:
    config, _ = load(ClusterConfig, *argv.split(), word="model")
    assert config.engine.compilation.cuda_graph_sizes == "1,2,4"
    assert config.engine.model.model in ("org/name", "x")


def test_a_yaml_file_of_vllm_s_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: org/name\nserved_model_name: [a, b]\nmax_model_len: 2048\nswap_space: 4\n"
        "enable-chunked-prefill: true\nhf_overrides:\n  rope_theta: 5\n"
        "disable_log_requests: true\nmax-num-seqs: null\n"
    )
    config, said = load(ClusterConfig, "--config", str(file))
    model = config.engine.model
    assert (model.served_model_name, model.max_model_len) == (["a", "b"], 2048)
    assert model.hf_overrides == {"rope_theta": 5}
    assert len(said) == 3
    file.write_text("served_model_name: one\n")
    assert load(ClusterConfig, f"--config={file}")[0].engine.model.served_model_name == ["one"]
    for text, says in (
        ("max_model_len: 1\nmax-model-len: 2\n", "max-model-len comes twice"),
        ("enable_chunked_prefill: false\n", "chunked prefill is always on"),
        ("max_modal_len: 1\n", "did you mean --max-model-len?"),
    ):
        file.write_text(text)
        assert says in refusal(capsys, f"--config={file}")


def test_a_program_gives_vllm_s_arguments(caplog: pytest.LogCaptureFixture) -> None:
    given = {"trust_remote_code": True, "swap_space": 4, "disable_log_stats": True}
    with caplog.at_level(logging.WARNING):
        assert with_values(ClusterConfig(), given) == ClusterConfig()
    assert len(caplog.messages) == 3
    for values, says in (
        ({"enable_chunked_prefill": False}, "chunked prefill is always on"),
        ({"limit_mm_per_prompt": {"image": 1}}, "only the text model"),
        ({"enable_sleep_mode": True}, "vLLM's enable_sleep_mode is not available here"),
        ({"max_modal_len": 1}, "did you mean max_model_len?"),
    ):
        with pytest.raises(ConfigError, match=says):
            with_values(ClusterConfig(), values)


@pytest.mark.parametrize("cls", [ClusterConfig, RouterConfig])
def test_vllm_s_api_key_is_taken(cls: type) -> None:
    config, said = load(cls, env={"VLLM_API_KEY": "secret"})
    assert config.server.api_key == "secret"
    assert said == ["VLLM_API_KEY is taken as --api-key"]
    for argv, env in ((["--api-key=own"], {}), ([], {"PDSERVE_API_KEY": "own"})):
        config, said = load(cls, *argv, env={"VLLM_API_KEY": "secret", **env})
        assert config.server.api_key == "own"
        assert said == ["VLLM_API_KEY is not used, because --api-key is given"]
    config, said = load(cls, env={"VLLM_API_KEY": ""})
    assert (config.server.api_key, said) == (None, [])


def test_a_file_s_key_comes_before_vllm_s_variable(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("api_key: own\n")
    config, _ = load(RouterConfig, f"--config={file}", env={"VLLM_API_KEY": "secret"})
    assert config.server.api_key == "own"


def test_several_keys_are_one_word_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("api_key: [one, two]\n")
    assert load(RouterConfig, f"--config={file}")[0].server.api_key == "one,two"
    for argv in (["--api-key", "one", "two"], ["--model=m", "--api-key", "one", "two", "three"]):
        line = refusal(capsys, *argv, cls=ClusterConfig)
        assert line == "--api-key takes one word: give several keys with commas between"
    assert "two" not in refusal(capsys, "--api-key", "one", "two", cls=RouterConfig)
    config, _ = load(ClusterConfig, "--api-key", "one", "org/name", word="model")
    assert (config.server.api_key, config.engine.model.model) == ("one", "org/name")


def test_variables_are_taken_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    env = {
        "VLLM_LOGGING_LEVEL": "WARN",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "5",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_PORT": "5000",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
        "VLLM_FOO_KEY": "hidden",
    }
    config, said = load(RouterConfig, env=env)
    assert (config.log.log_level, config.server.timeout_keep_alive) == ("warning", 5.0)
    text = "\n".join(said)
    assert all(name in text for name in env)
    assert "VLLM_ATTENTION_BACKEND, VLLM_FOO_KEY" in said[-1]
    assert "hidden" not in text
    assert len(said) == len(env) - 1
    assert "VLLM_LOGGING_LEVEL: 'loud' is none of" in refusal(
        capsys, env={"VLLM_LOGGING_LEVEL": "loud"}
    )


def test_variables_of_other_roles_and_of_a_kubernetes_service_are_no_news() -> None:
    env = {
        "VLLM_API_KEY": "secret",  # a node has no HTTP clients
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    config, said = load(WorkerNodeConfig, env=env)
    assert (config, said) == (WorkerNodeConfig(), [])
    assert load(PlanConfig, env=env) == (PlanConfig(), [])


@pytest.mark.parametrize(
    ("topic", "has", "has_not"),
    [
        ("CacheConfig", "--block-size N", "--port"),
        ("kv cache", "--kv-cache-dtype", "--kv-lease"),
        ("max-num-seqs", "most sequences in one step", "--max-num-batched-tokens"),
        ("--max_num_seqs", "most sequences in one step", "--max-num-batched-tokens"),
        ("max-num", "--max-num-batched-tokens", "--port"),
        ("listgroup", "SchedulerConfig", "--port"),
        ("all", "usage: pdserve test", "did you mean"),
        ("swap-space", "a preempted sequence is computed again", "--port"),
        ("uvicorn-log-level", "is called --log-level here", "--port"),
    ],
)
def test_help_of_a_group_or_a_flag(
    topic: str, has: str, has_not: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(ClusterConfig, "--wrong", f"--help={topic}")
    assert ended.value.code == 0
    output = capsys.readouterr()
    assert has in output.out and has_not not in output.out
    assert output.err == ""


def test_help_of_nothing_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean CacheConfig?" in refusal(capsys, "--help=CachConfig")
    assert "--help=listgroup lists the groups" in refusal(capsys, "--help=zzz")


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        ("--reasoning-parser qwn3", "qwen3"),
        ("--dtype bfloat61", "bfloat16"),
        ("--kv-cache-dtype FP8_E4M3", "fp8_e4m3"),
        ("--log-level warnings", "warning"),
        ("--scheduling-policy fcs", "fcfs"),
    ],
)
def test_a_near_miss_of_a_choice_names_it(
    argv: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"did you mean {nearest}?" in refusal(capsys, *argv.split())
