"""Where options come from, and that a misspelt one is never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.engine import (
    AUTO,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.common.config.node import TransferConfig, WorkerNodeConfig
from pdserve.common.config.options import options, to_flags, with_values
from pdserve.common.config.router import RouterConfig
from pdserve.common.config.sources import ROLE_CONFIGS, parse
from pdserve.common.config.speculation import SpeculationOptions
from pdserve.common.core.errors import ConfigError


def load(cls: type, *argv: str, env: Mapping[str, str] | None = None) -> Any:
    return parse(cls, prog="pdserve test", argv=argv, environ=env or {})


def refused(
    capsys: pytest.CaptureFixture[str],
    cls: type,
    *argv: str,
    env: Mapping[str, str] | None = None,
) -> str:
    """The one line with which the process ends."""
    with pytest.raises(SystemExit) as exit:
        load(cls, *argv, env=env)
    assert exit.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("pdserve test: error: ")
    assert output.err.count("\n") == 1
    return output.err


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "pdserve.yaml"
    path.write_text(text)
    return f"--config={path}"


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "port: 1\nhost: from-file\nseed: 3\n")
    env = {"PDSERVE_PORT": "2", "PDSERVE_HOST": "from-env", "PDSERVE_MAX_MODEL_LEN": ""}
    config = load(RouterConfig, file, "--port=4", env=env)
    assert (config.server.port, config.server.host, config.model.seed) == (4, "from-env", 3)
    assert config.model.max_model_len is None, "an empty variable is an absent one"
    named = load(RouterConfig, env={"PDSERVE_CONFIG": file.removeprefix("--config=")})
    assert named.server.port == 1


@pytest.mark.parametrize(
    ("argv", "env", "file", "expected"),
    [
        ([], {}, "", True),
        ([], {}, "enable-prefix-caching: false", False),
        (["--no-enable-prefix-caching"], {}, "", False),
        ([], {"PDSERVE_ENABLE_PREFIX_CACHING": "false"}, "", False),
        ([], {"PDSERVE_ENABLE_PREFIX_CACHING": "true"}, "enable-prefix-caching: false", True),
        (["--enable-prefix-caching"], {"PDSERVE_ENABLE_PREFIX_CACHING": "0"}, "", True),
    ],
)
def test_booleans(
    argv: list[str], env: dict[str, str], file: str, expected: bool, tmp_path: Path
) -> None:
    config = load(WorkerNodeConfig, yaml_file(tmp_path, file or "{}"), *argv, env=env)
    assert config.engine.cache.enable_prefix_caching is expected
    off = ["--no-enable-prefix-caching"]
    assert to_flags(config) == ([] if expected else off), "as it is passed on to a child"


def test_vllm_s_forms_of_flags_are_accepted(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "max-num-seqs: 1.5k\ndtype: float\n")
    flags = ("--max_model_len=8K", "--max_num_batched_tokens", "2k")
    engine = load(WorkerNodeConfig, file, *flags).engine
    assert (engine.model.max_model_len, engine.model.dtype) == (8192, "float32")
    assert engine.scheduler.max_num_batched_tokens == 2000
    assert engine.scheduler.max_num_seqs == 1500
    for given in ({}, {"PDSERVE_DTYPE": "half"}):
        config = load(WorkerNodeConfig, *([] if given else ["--dtype=half"]), env=given)
        assert config.engine.model.dtype == "float16"
    assert with_values(ClusterConfig(), {"dtype": "half"}).engine.model.dtype == "float16"


@pytest.mark.parametrize(("drafts", "tokens", "rows"), [(0, 64, 8), (3, 64, 32), (3, 20, 20)])
def test_memory_is_kept_for_a_row_of_each_sequence_and_draft(
    drafts: int, tokens: int, rows: int
) -> None:
    given = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else {}
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=tokens)
    speculation = SpeculationOptions(speculative_config=given)
    assert EngineConfig(scheduler=scheduler, speculation=speculation).max_num_rows == rows


def test_auto_is_a_context_window(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--max-model-len", "auto"), ("--max-model-len", "-1")):
        assert load(WorkerNodeConfig, *flags).engine.model.max_model_len == AUTO
    given = with_values(ClusterConfig(), {"max_model_len": "auto"})
    assert given.engine.model.max_model_len == AUTO
    for wrong in ("0", "-2", "all"):
        with pytest.raises(SystemExit) as ended:
            load(WorkerNodeConfig, f"--max-model-len={wrong}")
        assert ended.value.code == 2
        assert "--max-model-len" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["sql=/a", [1], ["sql=/a", ""], ("sql=/a",), None, {}])
def test_a_program_s_list_that_is_no_list_of_texts_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a list of texts"):
        with_values(ClusterConfig(), {"enable_lora": True, "lora_modules": value})


def test_json_from_a_flag_and_a_mapping_from_the_file(tmp_path: Path) -> None:
    expected = {"streams": 2, "name": "yes"}
    flag = load(WorkerNodeConfig, '--kv-connector-config={"streams": 2, "name": "yes"}')
    file = load(
        WorkerNodeConfig,
        yaml_file(tmp_path, 'kv-connector-config:\n  streams: 2\n  name: "yes"\n'),
    )
    assert flag.transfer.kv_connector_config == file.transfer.kv_connector_config == expected


def test_yaml_words_stay_words(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "restart: no\nserved-model-name: 0x10\nmax-model-len: null\n")
    config = load(ClusterConfig, file)
    assert config.restart == "no"
    assert config.engine.model.served_model_name == ["0x10"]
    assert config.engine.model.max_model_len is None


def test_an_owner_s_default_beats_the_part_s() -> None:
    """`up` takes a free gRPC port where a router alone takes 8001."""
    assert load(ClusterConfig).server.grpc_port == load(ClusterConfig).server.registry_port == 0
    assert load(RouterConfig).server.grpc_port == 8001
    assert load(RouterConfig).server.registry_port == 8002
    assert load(ClusterConfig, "--port=9").server.grpc_port == 0


@pytest.mark.parametrize(
    ("argv", "env", "hint"),
    [
        (["--prot=1"], {}, "unknown option --prot; did you mean --port?"),
        (["--max_modal_len", "5"], {}, "did you mean --max-model-len?"),
        (["--no-compile"], {}, "option --no-compile was removed: leave it out"),
        ([], {"PDSERVE_COMPILE": "1"}, "variable PDSERVE_COMPILE was removed: leave it out"),
        (["--max-model-len=1.0001k"], {}, "'1.0001k' is not a whole number"),
        (["--port=70k"], {}, "--port: 70000 is more than 65535"),
        (["--max-model", "5"], {}, "unknown option --max-model;"),
        (["stray"], {}, "no option takes the word stray; did you mean --model stray?"),
        ([], {"PDSERVE_PROT": "1"}, "unknown variable PDSERVE_PROT; did you mean PDSERVE_PORT?"),
        (["--port=x"], {}, "--port: 'x' is not a whole number"),
        (["--port=70000"], {}, "--port: 70000 is more than 65535"),
        (["--port=-1"], {}, "--port: -1 is less than 0"),
        (["--queue-timeout=nan"], {}, "--queue-timeout: nan is not a finite number"),
        ([f"--port={10**400}"], {}, "--port: a number of 1329 bits is too large"),
        ([], {"PDSERVE_BREAKER_FAILURES": "0"}, "--breaker-failures: 0 is less than 1"),
        (["--log-level=loud"], {}, "--log-level: 'loud' is none of debug"),
        (["--heartbeat-timeout=1"], {}, "must exceed --heartbeat-interval"),
        (["--config=/nowhere.yaml"], {}, "/nowhere.yaml"),
    ],
)
def test_unusable_options_are_refused_in_one_line(
    argv: list[str], env: dict[str, str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hint in refused(capsys, RouterConfig, *argv, env=env)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("prot: 1", "unknown option --prot; did you mean --port?"),
        ("max_modal_len: 1", "did you mean --max-model-len?"),
        ("port: [1, 2]", "port takes one value, not a list"),
        ("port: many", "--port: 'many' is not a whole number"),
        ("- port", "not a mapping of options"),
        ("port: {", "pdserve.yaml: while parsing"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    text: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hint in refused(capsys, RouterConfig, yaml_file(tmp_path, text))
    for value in ("[1]", "{"):
        line = refused(capsys, WorkerNodeConfig, f"--kv-connector-config={value}")
        assert "is not a JSON object" in line


def test_a_variable_of_another_role_is_no_error() -> None:
    env = {"PDSERVE_KV_CONNECTOR": "tcp", "PDSERVE_CACHE": "/tmp", "OTHER": "1"}
    assert load(RouterConfig, env=env) == RouterConfig()


def test_flags_make_an_equal_config() -> None:
    config = WorkerNodeConfig(
        engine=EngineConfig(
            model=ModelConfig(model="-odd name", max_model_len=128),
            parallel=ParallelConfig(tensor_parallel_size=2, distributed_timeout=1.5),
        ),
        transfer=TransferConfig(kv_connector_config={"a": ["b", 1]}),
    )
    assert load(WorkerNodeConfig, *to_flags(config)) == config
    assert to_flags(WorkerNodeConfig()) == []


def test_help_names_every_option_its_default_and_its_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit:
        load(ClusterConfig, "--help", env={"PDSERVE_PORT": "not read"})
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in options(ClusterConfig()):
        assert option.flag in text
        assert f"{option.env}]" in text
    assert "HTTP port (0: a free one) [default: 8000; PDSERVE_PORT]" in text
    for title in ("Cluster:", "HTTP and gRPC front:", "KV cache:", "Routing:"):
        assert title in text


@pytest.mark.parametrize("cls", ROLE_CONFIGS)
def test_options_have_names_of_their_own_help_bounds_and_good_defaults(cls: type) -> None:
    assert load(cls) == cls()
    found = list(options(cls()))
    assert len({option.name for option in found}) == len(found)
    for option in found:
        assert option.metadata["help"]
        if option.kind in (int, float):
            assert "minimum" in option.metadata, option.name
            if option.default is not None:
                assert option.convert(str(option.default)) == option.default
        if (choices := option.metadata.get("choices")) is not None:
            assert option.default in choices or (option.optional and option.default is None)
