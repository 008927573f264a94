"""Wrongly deployed clusters, and the findings of `pdserve doctor --cluster` for each. The table in
docs/reference/misdeployments.md is generated from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KEY, OTHER_KEY = "of-this-test-and-no-other", "of-another-cluster-16"
APART: Sequence[tuple[str, dict[str, Any]]] = (("prefill", {}), ("decode", {}))


@dataclass(frozen=True)
class Misdeployment:
    """A mistake and its finding; `…` stands for parts that differ between runs. `nodes`: roles with
    options. `router`: its options. `then`: what the test does once they run."""

    wrong: str
    says: str
    nodes: Sequence[tuple[str, dict[str, Any]]] = APART
    router: dict[str, Any] = field(default_factory=dict)
    then: str = ""
    verdict: str = "failed"


MISDEPLOYMENTS = (
    Misdeployment(
        "no node was started, or none finds the router",
        "none: no prefill and no decode node",
        nodes=(),
    ),
    Misdeployment(
        "the roles are swapped: prefill nodes alone",
        "2 prefill: no decode node",
        nodes=(("prefill", {}), ("prefill", {})),
    ),
    Misdeployment(
        "decode nodes alone",
        "1 decode: no prefill node",
        nodes=(("decode", {}),),
    ),
    Misdeployment(
        "a node has another cluster key",
        "refused … times: the call was made with another cluster key",
        nodes=(("prefill", {"cluster_key": KEY}), ("decode", {"cluster_key": OTHER_KEY})),
        router={"cluster_key": KEY},
    ),
    Misdeployment(
        "a node has no cluster key",
        "refused … times: the call has no token of the cluster key",
        nodes=(("prefill", {"cluster_key": KEY}), ("decode", {})),
        router={"cluster_key": KEY},
    ),
    Misdeployment(
        "a node serves another model",
        "refused … times: decode-… serves 'other' but this router serves",
        nodes=(("prefill", {}), ("decode", {"served_model_name": "other"})),
    ),
    Misdeployment(
        "a node registers at the clients' port",
        "refused … times: nodes do not register at this port",
        nodes=(("prefill", {}), ("decode", {"router": "GRPC"})),
        verdict="warning",  # any client can call that port
    ),
    Misdeployment(
        "the roles have different dtypes",
        "unpaired: it fits no decode node (…dtype float32 ≠ bfloat16…)",
        nodes=(("prefill", {}), ("decode", {"dtype": "bfloat16"})),
    ),
    Misdeployment(
        "the roles keep KV in different dtypes",
        "unpaired: it fits no decode node (…kv_cache_dtype int8 ≠ auto…)",
        nodes=(("prefill", {"kv_cache_dtype": "int8"}), ("decode", {})),
    ),
    Misdeployment(
        "half a rollout: one role has other weights",
        "unpaired: it fits no decode node (…weights…)",
        nodes=(("prefill", {}), ("decode", {"model": "OTHER WEIGHTS"})),
    ),
    Misdeployment(
        "the roles have different block sizes",
        "unpaired: it fits no decode node (…block_size 16 ≠ 32…)",
        nodes=(("prefill", {"block_size": 16}), ("decode", {"block_size": 32})),
    ),
    Misdeployment(
        "the roles have no KV connector in common",
        "no common KV connector (shm ≠ tcp)",
        nodes=(("prefill", {"kv_connector": "shm"}), ("decode", {"kv_connector": "tcp"})),
    ),
    Misdeployment(
        "no shared memory: KV falls back to TCP on one host",
        "KV goes by tcp between two nodes of one host (shm, tcp and tcp)",
        nodes=(("prefill", {}), ("decode", {"kv_connector": "tcp"})),
    ),
    Misdeployment(
        "a decode node announces an address that the router cannot reach",
        "it cannot be reached: …",
        nodes=(("prefill", {}), ("decode", {"advertise_host": "127.0.0.2"})),
    ),
    Misdeployment(
        "one way of the network is blocked: prefill nodes do not reach decode nodes",
        "decode-… computed the prompt itself, because no prefill node handed KV over",
        then="one-way network",
    ),
    Misdeployment(
        "KV is damaged on its way each time",
        "decode-… computed the prompt itself, because no prefill node handed KV over",
        nodes=(
            ("prefill", {"kv_connector": "corrupt_connector:CorruptShm"}),
            ("decode", {"kv_connector": "corrupt_connector:CorruptShm"}),
        ),
    ),
    Misdeployment(
        "digests are switched off",
        "KV moved, and its digests were not compared",
        nodes=(("prefill", {}), ("decode", {"no_enable_kv_digests": ""})),
        verdict="warning",
    ),
    Misdeployment(
        "every prompt counts as a short one",
        "decode-… computed the prompt itself: it is shorter than the router allows",
        router={"local_prefill_threshold": 100_000},
    ),
    Misdeployment(
        "a node of both roles beside the pairs",
        "both-… has both roles, so it computes prompts beside decoding",
        nodes=(*APART, ("both", {})),
        verdict="warning",
    ),
    Misdeployment(
        "one of two decode nodes has a tiny --max-model-len",
        "it holds 64 tokens of context, but the router offers …: longer requests go to other nodes",
        nodes=(*APART, ("decode", {"max_model_len": 64})),
        verdict="warning",
    ),
    Misdeployment(
        "a node is frozen",
        "lost: …",
        then="freeze the decode node",
    ),
    Misdeployment(
        "the clocks of two hosts are minutes apart",
        "its clock is 120 s ahead of the router's: set the clocks (NTP)",
        then="a wrong clock",
        verdict="warning",
    ),
    Misdeployment(
        "a proxy buffers event streams",
        "…: a proxy holds them back",
        then="ask through a proxy that buffers",
    ),
    Misdeployment(
        "a proxy answers in the router's place",
        "HTTP 502…",
        then="ask through a proxy that answers 502",
    ),
    Misdeployment(
        "the URL is a node's metrics port, or another server's",
        "…/v1/cluster is not a pdserve router's",
        then="ask another server",
    ),
    Misdeployment(
        "the API key is wrong",
        "…API key…",
        router={"api_key": "right"},
        then="ask with a wrong key",
    ),
)
