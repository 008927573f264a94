"""`pdserve doctor --cluster URL`: sends requests to prove that prefill and decode run on different
nodes and that KV moves between them, or reports what is wrong.

    /v1/cluster ─▶ which nodes are registered, which were refused, which links are broken
    probes      ─▶ one prompt several times, without prefix cache: which nodes computed it, how many
                   bytes of KV moved, over which connector, verified or not, computed twice or not
    a stream    ─▶ whether events arrive while the answer is generated, or a proxy holds them back
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.cli.doctor_stream import stream
from pdserve.cli.finding import Finding, Verdict
from pdserve.client.server import OPERATOR_KEY, Server, client_session, key_from_environment
from pdserve.common.core.errors import (
    ModelNotFound,
    NodeError,
    PdserveError,
    PermissionDenied,
    Unauthenticated,
)
from pdserve.common.core.printable import printable
from pdserve.common.core.request import PromptPath

TIMEOUT = 8.0  # seconds for one answer
MAX_REASON = 1000  # characters
RECENT = 120.0  # seconds for which a refused node is reported
PROBE_TOKENS = 4  # most tokens of an answer
MIN_PROMPT, MAX_PROMPT = 64, 2048  # words; each is a token or more
WORDS = ("the", "a", "of", "in", "is", "it", "on", "as")
MAX_ROUNDS = 4  # of probes; ends earlier once every node has had one
MAX_PROBES = 64  # per round
_KEY = "set PDSERVE_ADMIN_API_KEY or OPENAI_API_KEY to a key of the router"
_ROUTER_LOG = "look for its request id in the router's log"

OK, WARNING, FAILED = Verdict.OK, Verdict.WARNING, Verdict.FAILED


def cluster(url: str, timeout: float = TIMEOUT) -> Iterator[Finding]:
    """Checks the cluster behind a router's or proxy's `url`; `timeout` is in seconds, for one
    answer. Yields a finding for each check.

    Raises:
        ConfigError: `url` is not a URL of a server, or a key cannot be sent.
    """
    yield from asyncio.run(_examine(url, timeout))


async def _examine(url: str, timeout: float) -> list[Finding]:
    key = key_from_environment(OPERATOR_KEY) or key_from_environment()
    async with client_session(key, timeout=timeout) as session:
        server = Server(session, url)
        try:
            state = await _state(server)
            if not state["ready"]:
                return [*_membership(state), _not_ready(state)]
            tried = await _try(server, state)
            return [
                *_membership(await _state(server)),
                *tried,
            ]  # the probes may have changed the state
        except (Unauthenticated, PermissionDenied) as error:
            return [Finding("router", FAILED, error.message, _KEY)]
        except PdserveError as error:
            return [Finding("router", FAILED, error.message, "check the URL, the port and proxies")]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            seen = f"{server.url} has answers of another release: {error!r}"
            return [Finding("router", FAILED, seen, "run one release of pdserve on all hosts")]


async def _state(server: Server) -> dict[str, Any]:
    try:
        state = await server.get("/v1/cluster")
    except ModelNotFound:  # HTTP 404
        state = None
    if not isinstance(state, dict) or not {"nodes", "ready", "reason"} <= state.keys():
        raise NodeError(f"{server.url}/v1/cluster is not a pdserve router's")
    return state


async def _try(server: Server, state: Mapping[str, Any]) -> list[Finding]:
    try:
        return [*await _probe(server, state), await stream(server, _context(state["nodes"]))]
    except PdserveError as error:
        fix = f"see the other findings; {_ROUTER_LOG}"
        return [Finding("probe", FAILED, f"{error.message} ({error.code})", fix)]


def _not_ready(state: Mapping[str, Any]) -> Finding:
    reason = printable(str(state["reason"]), MAX_REASON)
    return Finding("ready", FAILED, reason, "start or repair the nodes that it names")


# ---- membership ------------------------------------------------------------------------------


def _membership(state: Mapping[str, Any]) -> Iterator[Finding]:
    nodes = state["nodes"]
    roles = [node["role"] for node in nodes]
    count = {role: roles.count(role) for role in ("prefill", "decode", "both")}
    seen = ", ".join(f"{number} {role}" for role, number in count.items() if number) or "none"
    missing = [role for role in ("prefill", "decode") if not count[role]]
    if missing and not (len(missing) == 2 and count["both"]):
        fix = f"start a {' and a '.join(missing)} node with --router at this router's registry port"
        yield Finding("roles", FAILED, f"{seen}: no {' and no '.join(missing)} node", fix)
    else:
        apart = "" if count["prefill"] else ": no node computes prompts alone"
        yield Finding("roles", OK, seen + apart)
    for node in nodes:
        if node["state"] != "ready":
            reason = printable(str(node["reason"]), MAX_REASON)
            yield Finding(
                node["node_id"],
                FAILED,
                f"{node['state']}: {reason}",
                _FIXES.get(node["state"], "see its log"),
            )
        elif node["reason"] not in ("", "ok"):
            reason = printable(str(node["reason"]), MAX_REASON)
            yield Finding(node["node_id"], WARNING, reason, "repair the cause that it names")
    for refusal in state.get("refused", ()):
        if refusal["seconds_ago"] < RECENT:
            seen = f"refused {refusal['count']} times: {printable(refusal['reason'], MAX_REASON)}"
            verdict = WARNING if refusal.get("port") == "clients" else FAILED
            yield Finding("registration", verdict, seen, "give that node the same options")
    for link in state.get("broken_links", ()):
        seen = printable(link["reason"], MAX_REASON)
        fix = "check --kv-host, --advertise-host, --kv-connector and firewalls between the two"
        yield Finding(f"{link['prefill']} → {link['decode']}", FAILED, seen, fix)


_FIXES = {
    "lost": "check that its process runs and that the router can reach its port",
    "unhealthy": "see its log",
    "broken": "see its log for what failed",
    "unpaired": "start both roles with the same model, options and release",
}


# ---- probes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt's answer."""

    line: Mapping[str, Any]  # its timeline
    text: str

    @property
    def pair(self) -> tuple[str, str]:
        return str(self.line.get("prefill_node", "")), str(self.line.get("decode_node", ""))


async def _probe(server: Server, state: Mapping[str, Any]) -> list[Finding]:
    """Sends probes, several at once so that the load spreads, until every usable node has had
    one."""
    nodes = {node["node_id"]: node for node in state["nodes"]}
    usable = {name for name, node in nodes.items() if node["state"] == "ready"}
    model, prompt = await server.model(), _prompt(nodes.values())
    wide = min(MAX_PROBES, max(2, len(usable)))
    probes: list[Probe] = []
    for _ in range(MAX_ROUNDS):
        sent = (_ask(server, model, prompt) for _ in range(wide))
        probes += await asyncio.gather(*sent)
        if usable <= {name for probe in probes for name in probe.pair}:
            break
    return [*_paths(probes, nodes), *_missed(probes, usable), *_agreement(probes)]


def _prompt(nodes: Collection[Mapping[str, Any]]) -> str:
    """Returns a prompt of at least two full blocks, where the context allows it."""
    most = _context(nodes)
    block = max((node.get("block_size") or 16 for node in nodes), default=16)
    length = min(max(MIN_PROMPT, 3 * block), MAX_PROMPT, max(8, most // 4))
    draw = random.Random(0)  # equal in every probe, so that answers must be equal
    return " ".join(draw.choice(WORDS) for _ in range(length))


def _context(nodes: Iterable[Mapping[str, Any]]) -> int:
    """Returns the tokens of the shortest context of the nodes."""
    return min((node.get("max_model_len") or MAX_PROMPT for node in nodes), default=MAX_PROMPT)


async def _ask(server: Server, model: str, prompt: str) -> Probe:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": PROBE_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": secrets.token_hex(16),  # so that the prefix cache has no hit
        "timeline": True,
    }
    answer = await server.post("/v1/completions", body)
    try:
        return Probe(answer["pdserve"]["timeline"], answer["choices"][0]["text"])
    except (LookupError, TypeError):
        raise NodeError(
            "the answer to a probe has no timeline: is it pdserve, of this release?"
        ) from None


def _paths(probes: Sequence[Probe], nodes: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields a finding for each pair of nodes that answered."""
    for pair in dict.fromkeys(probe.pair for probe in probes):
        lines = [probe.line for probe in probes if probe.pair == pair]
        prefill, decode = pair
        wrong = next(filter(None, (_fault(line, nodes) for line in lines)), None)
        if wrong is not None:
            yield Finding(*((f"{prefill} → {decode}" if prefill != decode else decode), *wrong))
        elif lines[0].get("path") == PromptPath.LOCAL:
            yield Finding(decode, OK, f"{len(lines)} prompts computed by a node of both roles")
        else:
            yield Finding(f"{prefill} → {decode}", OK, _moved(lines))


def _moved(lines: Sequence[Mapping[str, Any]]) -> str:
    moved = sum(line["transfer_bytes"] for line in lines)
    names = sorted({name for line in lines for name in line["kv_connectors"]})
    runs = sum(line["verified_runs"] for line in lines)
    return (
        f"{len(lines)} prompts, {moved:,} bytes of KV by {', '.join(names)}, {runs} digests right, "
        "0 tokens computed twice"
    )


def _fault(line: Mapping[str, Any], nodes: Mapping[str, Any]) -> tuple[Verdict, str, str] | None:
    """Returns (verdict, what was seen, fix) if the path of a probe is wrong, else None."""
    prefill, decode = line.get("prefill_node", ""), line.get("decode_node", "")
    match line.get("path"):
        case PromptPath.STAND_IN:
            seen = f"{decode} computed the prompt itself, because no prefill node handed KV over"
            return FAILED, seen, "repair the prefill nodes or the links that are named here"
        case PromptPath.LOCAL if nodes.get(decode, {}).get("role") != "both":
            seen = f"{decode} computed the prompt itself: it is shorter than the router allows"
            return FAILED, seen, "lower the router's --local-prefill-threshold"
        case PromptPath.LOCAL:
            if {"prefill", "decode"} & {node["role"] for node in nodes.values()}:
                seen = f"{decode} has both roles, so it computes prompts beside decoding"
                return WARNING, seen, "start it as a decode node if that is not intended"
            return None
        case PromptPath.TRANSFERRED:
            pass
        case other:
            seen = f"the router does not say how {decode} got the prompt's KV ({other!r})"
            return FAILED, seen, "run one release of pdserve on all hosts"
    if line["recomputed_tokens"] or line["migrations"]:
        seen = f"{line['recomputed_tokens']} tokens were computed twice, after a node had failed"
        return FAILED, seen, _ROUTER_LOG
    roles = [nodes.get(name, {}).get("role") for name in (prefill, decode)]
    if roles != ["prefill", "decode"]:
        seen = f"the timeline names {prefill} and {decode}, which are not registered with that role"
        return FAILED, seen, "run it again while no node joins or leaves"
    if not line["transfer_bytes"] or not line["kv_connectors"]:
        return FAILED, "no byte of KV moved", "report this"
    if not line["verified_runs"]:
        seen = "KV moved, and its digests were not compared"
        return WARNING, seen, "start the decode node with --enable-kv-digests"
    return _connector_fault(line["kv_connectors"], nodes.get(prefill, {}), nodes.get(decode, {}))


def _connector_fault(
    used: Sequence[str], prefill: Mapping[str, Any], decode: Mapping[str, Any]
) -> tuple[Verdict, str, str] | None:
    """Returns (verdict, seen, fix) if nodes of one host use neither shared memory nor CUDA IPC."""
    same_host = prefill.get("host") and prefill.get("host") == decode.get("host")
    if not same_host or set(used) <= {"shm", "cuda_ipc"}:
        return None
    ours, theirs = prefill.get("kv_connectors", []), decode.get("kv_connectors", [])
    if used and (set(used) - {"tcp", "nccl"} or "nccl" in used):
        return None  # a plugin's connector, or one for GPUs
    seen = (
        f"KV goes by {', '.join(used)} between two nodes of one host ({', '.join(ours)} and "
        f"{', '.join(theirs)})"
    )
    return (
        FAILED,
        seen,
        "start both with --kv-connector auto, in one IPC namespace, as the same user",
    )


def _missed(probes: Sequence[Probe], usable: set[str]) -> Iterator[Finding]:
    reached = {name for probe in probes for name in probe.pair}
    for name in sorted(usable - reached):
        seen = f"none of {len(probes)} probes came to it"
        fix = "run it again when the cluster is idle; routers prefer nodes that were faster"
        yield Finding(name, WARNING, seen, fix)


def _agreement(probes: Sequence[Probe]) -> Iterator[Finding]:
    """Checks that all nodes give the same greedy answer to the same prompt."""
    answers = {probe.text for probe in probes}
    if len(answers) == 1:
        yield Finding("answers", OK, f"{len(probes)} probes have the same answer")
        return
    by_node: dict[str, set[str]] = {}
    for probe in probes:
        for name in set(probe.pair):
            by_node.setdefault(name, set()).add(probe.text)
    common = max(answers, key=[probe.text for probe in probes].count)
    odd = sorted(name for name, texts in by_node.items() if common not in texts)
    who = f", and {', '.join(odd)} never gives the most frequent one" if odd else ""
    seen = f"one prompt has {len(answers)} different greedy answers{who}"
    fix = (
        "compare the weights, dtypes and releases of the nodes; half precision may differ a little"
    )
    yield Finding("answers", FAILED if odd else WARNING, seen, fix)
