"""vLLM's flags and variables: the parser's table, its options and docs/from-vllm.md agree."""

from __future__ import annotations

import re

import pytest

from paths import ROOT
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.options import options
from pdserve.common.config.vllm import VARIABLES, flags, names
from pdserve.common.config.vllm_flags import ABSENT, CALLED, NOTES, RULES, SAME, SGLANG

PAGE = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")
# Of each group of `vllm serve --help`, the flags that scripts have most.
COMMON = """
    model served-model-name tokenizer trust-remote-code dtype max-model-len quantization seed
    enforce-eager hf-token hf-overrides generation-config override-generation-config runner task
    load-format download-dir tensor-parallel-size pipeline-parallel-size data-parallel-size
    enable-expert-parallel nnodes distributed-executor-backend disable-custom-all-reduce
    block-size gpu-memory-utilization swap-space kv-cache-dtype kv-cache-memory-bytes
    enable-prefix-caching cpu-offload-gb limit-mm-per-prompt enable-lora lora-modules
    max-cpu-loras max-num-batched-tokens max-num-seqs enable-chunked-prefill scheduling-policy
    async-scheduling compilation-config speculative-config kv-transfer-config kv-events-config
    structured-outputs-config guided-decoding-backend disable-log-stats disable-log-requests
    enable-log-requests host port api-key uvicorn-log-level allowed-origins root-path middleware
    chat-template response-role enable-auto-tool-choice tool-call-parser tool-parser-plugin
    reasoning-parser enable-prompt-tokens-details enable-server-load-tracking
    enable-request-id-headers max-parallel-loading-workers default-chat-template-kwargs
    ssl-keyfile ssl-ca-certs api-server-count headless uds otlp-traces-endpoint
""".split()  # noqa: SIM905


def flags_of_up() -> set[str]:
    found = list(options(ClusterConfig()))
    return {option.key for option in found} | {
        option.metadata.get("short", "").removeprefix("--") for option in found
    }


def test_every_flag_has_one_row_and_only_what_is_here_is_an_option() -> None:
    here = flags_of_up() | {"config"}
    assert [name for name in SAME if name not in here] == []
    assert set(NOTES) <= set(SAME)
    listed = [flag.name for rule in RULES for flag in names(rule)]
    assert len(set(listed)) == len(listed)
    assert here.intersection(listed) == set()
    assert set(SAME).intersection(listed) == set()


@pytest.mark.parametrize("name", COMMON)
def test_a_flag_of_vllm_is_in_the_table(name: str) -> None:
    assert name in SAME or name in flags()


def test_a_flag_that_is_called_otherwise_names_an_option() -> None:
    here = flags_of_up()
    called = [rule.here.removeprefix("no-") for rule in (*CALLED, *SGLANG) if rule.here]
    assert [name for name in called if name not in here] == []
    taken = [each.taken for each in VARIABLES if each.taken]
    assert [name for name in taken if name.replace("_", "-") not in here] == []


def test_a_sentence_names_flags_that_exist() -> None:
    known = {*flags_of_up(), "advertise-host", *flags()}
    said = " ".join([*(rule.why for rule in RULES), *(each.why for each in VARIABLES)])
    assert [name for name in re.findall(r"--([a-z0-9-]+)", said) if name not in known] == []


def test_the_page_has_every_flag_once() -> None:
    part = PAGE.partition("## Flags")[2].partition("## Requests")[0]
    for name in (*SAME, *(flag.name for rule in ABSENT for flag in names(rule))):
        assert name.startswith("-") or f"`--{name}`" in part, name
