"""vLLM's flags, and what becomes of each here.

`vllm.py` reads these tables when it meets a name that is not an option, `docs/generate.py` makes
tables of docs/from-vllm.md from them. A row is a sentence and the flags it is true of. Flags
that change no answer are accepted with one line in the log; the others end the start.

In a row's names `x` is a switch, `x=` takes a word, `x=+` takes several, and `x|-s` has a short
form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

Fine = Callable[[str], bool]
"""Whether a flag with this value, as text, changes nothing. A switch has `true` or `false`."""

_EMPTY = frozenset({"false", "0", "0.0", "none", "null", "", "{}", "[]", "auto"})


def anything(value: str) -> bool:
    return True


def on(value: str) -> bool:
    return value == "true"


def off(value: str) -> bool:
    return value.strip().lower() in _EMPTY


def never(value: str) -> bool:
    return False


def only(*words: str) -> Fine:
    return lambda value: off(value) or value.lower() in words


def zero(value: str) -> bool:
    """Accepts `image=0,video=0` and `{"image": 0}`."""
    try:
        counts = json.loads(value)
    except (ValueError, RecursionError):
        counts = dict(pair.partition("=")[::2] for pair in value.split(","))
    return isinstance(counts, dict) and all(off(str(count)) for count in counts.values())


def backend(value: str) -> bool:
    """Accepts a backend of structured outputs by name, and JSON that says no more than that."""
    if not value.startswith("{"):
        return True
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        return False
    kept = {"backend", "disable_fallback"}
    return isinstance(given, dict) and all(
        key in kept or off(str(value)) for key, value in given.items()
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """A sentence about some flags. `why` is a clause; `here` the option that does the same."""

    names: str
    why: str = ""
    fine: Fine = anything
    here: str = ""
    project: str = "vLLM"


SAME = """
    model host port config root-path allow-credentials allowed-origins allowed-methods
    allowed-headers api-key ssl-certfile ssl-keyfile chat-template chat-template-content-format
    trust-request-chat-template enable-auto-tool-choice tool-call-parser reasoning-parser
    lora-modules enable-lora max-loras max-lora-rank served-model-name tokenizer tokenizer-mode
    dtype seed revision max-model-len quantization enforce-eager max-logprobs hf-overrides
    rope-scaling rope-theta generation-config model-impl load-format download-dir device
    distributed-executor-backend tensor-parallel-size pipeline-parallel-size data-parallel-size
    all2all-backend block-size gpu-memory-utilization kv-cache-memory-bytes kv-cache-dtype
    num-gpu-blocks-override enable-prefix-caching max-num-seqs max-num-batched-tokens
    scheduling-policy async-scheduling cuda-graph-sizes otlp-traces-endpoint speculative-config
    kv-events-config stream-interval
""".split()  # noqa: SIM905

NOTES = {
    "model": "or the word after `serve`: a folder, a GGUF file, or [a name of the "
    "Hub](operate.md#serve-a-model-by-name)",
    "host": "127.0.0.1 unless given: vLLM listens on all addresses",
    "api-key": "several with commas between, in one word; then adapters and `/reset_prefix_cache` "
    "need [`--admin-api-key`](reference/security.md#operators-and-clients)",
    "allowed-origins": "`*` by default only with `--api-key`; requests of [pages that may not "
    "ask](reference/security.md#browsers) are refused",
    "max-logprobs": "20 at most",
    "seed": "seeds dummy weights; a request without `seed` gets a random one",
    "quantization": "a checkpoint's format is found, and may be named; `int8` quantizes an "
    "unquantized one",
    "rope-scaling": "a short form of `--hf-overrides`; `longrope` and `dynamic` end at the "
    "[original context](operate.md#change-the-context)",
    "tool-call-parser": "`auto` unless given, and no `--enable-auto-tool-choice` is needed; the "
    "same names for [these](clients.md#tools), or a class; arguments that no schema types are JSON "
    "if they can be",
    "reasoning-parser": "`auto` unless given; the same names for [these](clients.md#reasoning); "
    "`none` leaves the thought in `content`",
    "tokenizer-mode": "`auto` takes `tokenizer.json` where there is one, `mistral` needs "
    "`tekken.json` ([which](reference/model-files.md#tokenizers)); there is no `slow`",
    "lora-modules": "`name=path`, or JSON; `base_model_name` there has no effect",
    "max-loras": "8; adapters a node holds, all in device memory",
    "scheduling-policy": "of the router; [between clients slots stay "
    "fair](admission.md#queue-order)",
    "kv-cache-dtype": "`auto`, `fp8_e4m3` (`fp8`), `int8`, with a scale per token and head, on "
    "CPUs ([KV in 8 bits](reference/quantization.md#kv-in-8-bits))",
    "load-format": "`auto`, `safetensors`, `dummy`; GGUF by the file's name",
    "model-impl": "`vllm` is `native`",
    "config": "keys may have underscores; vLLM's other flags are keys too",
}

CALLED = (
    Rule("uvicorn-log-level=", "for all processes", never, "log-level"),
    Rule("api-server-count|-asc=", "", never, "router-workers"),
    Rule("h11-max-incomplete-event-size=", "it bounds bodies, unpacked", never, "max-body-size"),
    Rule("tool-parser-plugin=", "give module:Class", off, "tool-call-parser"),
    Rule("override-generation-config=", "name a folder with yours", off, "generation-config"),
    Rule(
        "enable-expert-parallel",
        "it takes a number of ranks, such as that of --tensor-parallel-size",
        off, "expert-parallel-size",
    ),
    Rule(
        "distributed-timeout-seconds= cpu-distributed-timeout-seconds=",
        "", off, "distributed-timeout",
    ),
    Rule(
        "cudagraph-capture-sizes=+ max-cudagraph-capture-size=",
        "sizes with commas between", off, "cuda-graph-sizes",
    ),
    Rule("kv-transfer-config=", "it names no role: each process has its own", off, "kv-connector"),
    Rule("shutdown-timeout=", "", off, "drain-timeout"),
    Rule("max-num-queued-reqs=", "the router has the queue", off, "max-queued-requests"),
    Rule("worker-use-ray", "give ray", off, "distributed-executor-backend"),
    Rule(
        "spec-method= spec-model= spec-tokens= speculative-model= num-speculative-tokens= "
        "speculative-max-model-len= speculative-disable-by-batch-size= ngram-prompt-lookup-max= "
        "ngram-prompt-lookup-min= speculative-draft-tensor-parallel-size|-spec-draft-tp= "
        "speculative-model-quantization=",
        "all in one JSON object", off, "speculative-config",
    ),
    Rule("hf-config-path= config-format=", "", only("hf"), "hf-overrides"),
)  # fmt: skip

WITHOUT_EFFECT = (
    Rule(
        "enable-chunked-prefill",
        "chunked prefill is always on, so leave it out; --max-num-batched-tokens is the size",
        on,
    ),
    Rule(
        "trust-remote-code code-revision=",
        # True is accepted: vLLM too runs its own code for the families that it knows, and a
        # checkpoint of another family ends the start whatever this says.
        "no code of a checkpoint is ever run; the families are built in",
    ),
    Rule(
        "disable-log-requests enable-log-requests max-log-len= disable-uvicorn-access-log "
        "disable-access-log-for-endpoints= enable-log-outputs enable-log-deltas",
        "the router logs one line per request, without prompt and answer",
    ),
    Rule(
        "disable-log-stats aggregate-engine-logging enable-logging-iteration-details "
        "enable-server-load-tracking show-hidden-metrics-for-version= kv-cache-metrics "
        "kv-cache-metrics-sample= cudagraph-metrics enable-mfu-metrics jit-monitor-mode= "
        "jit-monitor-verbose enable-layerwise-nvtx-tracing ray-workers-use-nsight profiler-config= "
        "collect-detailed-traces= per-request-spec-decode-metrics",
        "statistics are metrics, which are always on",
    ),
    Rule(
        "log-config-file= log-error-stack",
        "the log goes to standard error, as --log-level and --log-format say",
    ),
    Rule("enable-prompt-tokens-details", "`prompt_tokens_details` is always in the usage"),
    Rule("enable-request-id-headers", "answers always have `X-Request-Id`"),
    Rule("disable-fastapi-docs enable-offline-docs", "`/docs` needs no other host and stays on"),
    Rule("h11-max-header-count=", "aiohttp bounds the headers of a request"),
    Rule(
        "disable-frontend-multiprocessing renderer-num-workers= tokenizer-pool-size= "
        "tokenizer-pool-type= tokenizer-pool-extra-config=",
        "the router prepares large bodies in processes of its own",
    ),
    Rule("enable-ssl-refresh", "renewed certificates are always used without a restart"),
    Rule(
        "guided-decoding-backend= structured-outputs-config= guided-decoding-disable-fallback",
        "llguidance computes every grammar; other settings are in a request's `structured_outputs`",
        backend,
    ),
    Rule("enable-reasoning", "--reasoning-parser is enough"),
    Rule(
        "compilation-config|-cc= optimization-level= -O= performance-mode= kernel-config= "
        "attention-backend= attention-config|-ac= moe-backend= linear-backend= ir-op-priority= "
        "enable-flashinfer-autotune enable-bf16x3-router-gemm disable-custom-all-reduce "
        "disable-cascade-attn gdn-prefill-backend= kda-prefill-backend= mamba-backend= "
        "mamba-ssu-algorithm= max-seq-len-to-capture= max-context-len-to-capture= "
        "disable-async-output-proc num-scheduler-steps= multi-step-stream-outputs "
        "additional-config=",
        "the device decides which kernels compute",
    ),
    Rule(
        "swap-space= preemption-mode=",
        "a preempted sequence is computed again, so nothing is swapped",
    ),
    Rule(
        "max-num-partial-prefills= max-long-partial-prefills= long-prefill-token-threshold= "
        "max-num-scheduled-tokens= scheduler-delay-factor= scheduler-reserve-full-isl watermark= "
        "prefill-schedule-interval= num-lookahead-slots= use-v2-block-manager "
        "disable-chunked-mm-input",
        "prompts share a step's tokens fairly",
    ),
    Rule(
        "prefix-caching-hash-algo= prefix-cache-retention-interval= prefix-match-unit= "
        "disable-hybrid-kv-cache-manager mamba-block-size= mamba-cache-mode= "
        "kv-offloading-backend=",
        "the KV cache has one kind of block table",
    ),
    Rule(
        "max-parallel-loading-workers= use-tqdm-on-load safetensors-load-strategy= "
        "safetensors-prefetch-num-threads= safetensors-prefetch-block-size= pt-load-map-location= "
        "model-loader-extra-config= ignore-patterns=+ allow-deprecated-quantization "
        "enable-ep-weight-filter",
        "each rank maps its part of the safetensors files",
    ),
    Rule(
        "numa-bind numa-bind-nodes=+ numa-bind-cpus=+ enable-cumem-allocator "
        "enable-nccl-comm-suspend fail-on-environ-validation enable-fault-tolerance "
        "fault-tolerance-config=",
        "the operating system places processes, and nodes may die",
    ),
    Rule(
        "enable-dbo ubatch-size= dbo-decode-token-threshold= dbo-prefill-token-threshold= "
        "enable-eplb eplb-config= expert-placement-strategy= dp-sync-interval= "
        "disable-nccl-for-dp-synchronization enable-batch-sharded-sampling",
        "batches are not split, and experts stay on their ranks",
    ),
    Rule(
        "fully-sharded-loras max-cpu-loras= specialize-active-lora lora-extra-vocab-size= "
        "long-lora-scaling-factors=",
        "adapters are split as the layers are, and all stay in device memory",
    ),
    Rule(
        "allowed-local-media-path= allowed-media-domains=+ media-io-kwargs= mm-processor-kwargs= "
        "mm-processor-cache-gb= mm-processor-cache-type= mm-hasher-algorithm= "
        "mm-shm-cache-max-object-size-mb= mm-encoder-tp-mode= mm-encoder-attn-backend= "
        "mm-encoder-attn-dtype= mm-encoder-fp8-scale-path= mm-encoder-fp8-scale-save-path= "
        "mm-encoder-fp8-scale-save-margin= interleave-mm-strings skip-mm-profiling "
        "video-pruning-rate= video-pruning-method= mm-tensor-ipc= mm-processor-device= "
        "mm-ipc-gpu-memory-gb= mm-device-do-normalize disable-mm-preprocessor-cache "
        "language-model-only enable-tower-connector-lora enable-flash-late-interaction",
        "only the text model of a multimodal checkpoint is served",
    ),
    Rule(
        "cohere-is-reasoning-model cohere-format=",
        "there is no `/cohere` path",
    ),
)

ABSENT = (
    Rule(
        "limit-mm-per-prompt= default-mm-loras= ec-transfer-config= ec-manager-config=",
        "only the text model of a multimodal checkpoint is served, so 0 is the limit",
        zero,
    ),
    Rule(
        "mm-encoder-only enable-mm-embeds enable-prompt-embeds",
        "a prompt is text or token ids",
        off,
    ),
    Rule(
        "runner= task= convert= pooler-config= override-pooler-config= io-processor-plugin= "
        "diffusion-config=",
        "models generate text",
        only("generate", "none"),
    ),
    Rule(
        "default-chat-template-kwargs=",
        "send `chat_template_kwargs` with the request",
        off,
    ),
    Rule(
        "return-tokens-as-token-ids enable-force-include-usage enable-per-request-metrics "
        "return-sampling-mask enable-return-routed-experts enable-trace-replay "
        "guided-decoding-disable-any-whitespace guided-decoding-disable-additional-properties "
        "reasoning-config=",
        "a client asks for such things in its request, where they exist",
        off,
    ),
    Rule(
        "exclude-tools-when-tool-choice-none",
        "the chat template sees the tools; a client that wants none sends none",
        off,
    ),
    Rule("response-role=", "answers have the role `assistant`", only("assistant")),
    Rule(
        "logprobs-mode=",
        "logprobs are those before temperature, top-k and top-p",
        only("raw_logprobs"),
    ),
    Rule("use-fp64-gumbel", "sampling has one precision", off),
    Rule("fingerprint-mode= fingerprint-value=", "answers have no `system_fingerprint`", off),
    Rule("tool-server=", "no tool is run here", off),
    Rule("enable-tokenizer-info-endpoint", "there is no `/tokenizer_info`", off),
    Rule("tokens-only skip-tokenizer-init", "the router tokenizes", off),
    Rule("uds= middleware=+ grpc", "the router listens on TCP, for HTTP and gRPC", off),
    Rule(
        "ssl-ca-certs= ssl-cert-reqs= ssl-ciphers=",
        "a client shows no certificate; put a proxy in front for that",
        off,
    ),
    Rule(
        "hf-token=",
        "set HF_TOKEN, as other users of the host can see flags",
        lambda value: value in ("", "true"),
    ),
    Rule("tokenizer-revision=", "the tokenizer comes with --revision, or from --tokenizer", off),
    Rule(
        "quantization-config= kv-cache-dtype-skip-layers=+ calculate-kv-scales "
        "override-attention-dtype= mamba-cache-dtype= mamba-ssm-cache-dtype= "
        "enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds= replayssm-buffer-len= "
        "use-replayssm kv-sharing-fast-prefill disable-sliding-window model-class-overrides=",
        "the checkpoint's config decides how it is computed; --hf-overrides changes it",
        off,
    ),
    Rule(
        "logits-processors=+ worker-cls= worker-extension-cls= scheduler-cls= "
        "reasoning-parser-plugin= qlora-adapter-name-or-path= weight-transfer-config=",
        "the engine takes no code or weights of yours",
        off,
    ),
    Rule(
        "lora-dtype= lora-target-modules=+ enable-lora-bias enable-mixed-moe-lora-format "
        "enable-moe-shared-loras",
        "adapters have the model's dtype and apply to linear layers",
        off,
    ),
    Rule(
        "enable-sleep-mode cpu-offload-gb= cpu-offload-params=+ offload-backend= "
        "offload-group-size= offload-num-in-group= offload-prefetch-step= offload-params=+ "
        "kv-offloading-size=",
        "weights and KV stay on the device; use more ranks",
        off,
    ),
    Rule("max-num-queued-tokens=", "--max-queued-requests bounds the queue", off),
    Rule("device-ids=", "set CUDA_VISIBLE_DEVICES", never),
    Rule(
        "nnodes|-n= node-rank|-r= master-addr= master-port= enable-elastic-ep "
        "data-parallel-rank|-dpn= data-parallel-start-rank|-dpr= data-parallel-size-local|-dpl= "
        "data-parallel-address|-dpa= data-parallel-rpc-port|-dpp= data-parallel-backend|-dpb= "
        "data-parallel-hybrid-lb|-dph data-parallel-external-lb|-dpe "
        "data-parallel-multi-port-external-lb|-dpm data-parallel-supervisor-port= "
        "dp-supervisor-probe-interval-s= dp-supervisor-probe-timeout-s= "
        "dp-supervisor-probe-failure-threshold= headless",
        "start `pdserve router` on one host, and `prefill` and `decode` nodes on each",
        only("1", "mp"),
    ),
    Rule(
        "decode-context-parallel-size|-dcp= prefill-context-parallel-size|-pcp= "
        "dcp-comm-backend= dcp-q-replicate dcp-kv-cache-interleave-size= "
        "cp-kv-cache-interleave-size=",
        "a sequence's tokens are not split over ranks",
        only("1"),
    ),
)

_SGLANG = {
    "model-path": "model", "tp-size": "tensor-parallel-size", "tp": "tensor-parallel-size",
    "pp-size": "pipeline-parallel-size", "dp-size": "data-parallel-size",
    "ep-size": "expert-parallel-size", "context-length": "max-model-len",
    "mem-fraction-static": "gpu-memory-utilization", "max-running-requests": "max-num-seqs",
    "chunked-prefill-size": "max-num-batched-tokens", "page-size": "block-size",
    "schedule-policy": "scheduling-policy", "tokenizer-path": "tokenizer",
    "disaggregation-transfer-backend": "kv-connector",
    "json-model-override-args": "hf-overrides", "lora-paths": "lora-modules",
    "disable-cuda-graph": "enforce-eager", "disable-radix-cache": "no-enable-prefix-caching",
    "random-seed": "seed",
}  # fmt: skip
_ROLES = "`pdserve serve` starts both roles, `pdserve prefill` and `pdserve decode` one"
SGLANG = (
    Rule("disaggregation-mode=", _ROLES, never, project="SGLang"),
    *(Rule(f"{name}=", "", never, here, project="SGLang") for name, here in _SGLANG.items()),
)

RULES = (*CALLED, *WITHOUT_EFFECT, *ABSENT, *SGLANG)
