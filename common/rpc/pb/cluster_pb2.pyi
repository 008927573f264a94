from pdserve.common.rpc.pb import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "role", "address", "model", "fingerprint", "fingerprint_parts", "kv_connectors", "tensor_parallel_size", "max_model_len", "block_size", "num_blocks", "host", "metrics_address", "pipeline_parallel_size", "expert_parallel_size", "data_parallel_size", "instance", "takes_adapters", "adapters", "states_alone", "pid")
    class FingerprintPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_PARTS_FIELD_NUMBER: _ClassVar[int]
    KV_CONNECTORS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TAKES_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STATES_ALONE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: Role
    address: str
    model: str
    fingerprint: str
    fingerprint_parts: _containers.ScalarMap[str, str]
    kv_connectors: _containers.RepeatedScalarFieldContainer[str]
    tensor_parallel_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    host: str
    metrics_address: str
    pipeline_parallel_size: int
    expert_parallel_size: int
    data_parallel_size: int
    instance: str
    takes_adapters: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    states_alone: bool
    pid: int
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., fingerprint_parts: _Optional[_Mapping[str, str]] = ..., kv_connectors: _Optional[_Iterable[str]] = ..., tensor_parallel_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., host: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pipeline_parallel_size: _Optional[int] = ..., expert_parallel_size: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., instance: _Optional[str] = ..., takes_adapters: _Optional[bool] = ..., adapters: _Optional[_Iterable[str]] = ..., states_alone: _Optional[bool] = ..., pid: _Optional[int] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "total_blocks", "waiting_tokens", "healthy", "reason", "most_free_blocks", "others", "others_tokens", "routers", "generation_tokens", "rates")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MOST_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    waiting_tokens: int
    healthy: bool
    reason: str
    most_free_blocks: int
    others: int
    others_tokens: int
    routers: int
    generation_tokens: int
    rates: Rates
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., healthy: _Optional[bool] = ..., reason: _Optional[str] = ..., most_free_blocks: _Optional[int] = ..., others: _Optional[int] = ..., others_tokens: _Optional[int] = ..., routers: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("prefill", "step", "sequence", "transfer")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    prefill: float
    step: float
    sequence: float
    transfer: float
    def __init__(self, prefill: _Optional[float] = ..., step: _Optional[float] = ..., sequence: _Optional[float] = ..., transfer: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("node", "load", "time_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    node: NodeInfo
    load: NodeLoad
    time_s: float
    def __init__(self, node: _Optional[_Union[NodeInfo, _Mapping]] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., time_s: _Optional[float] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("heartbeat_interval_s", "router", "sibling_ports")
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    SIBLING_PORTS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_s: float
    router: str
    sibling_ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, heartbeat_interval_s: _Optional[float] = ..., router: _Optional[str] = ..., sibling_ports: _Optional[_Iterable[int]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "load", "instance", "time_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    load: NodeLoad
    instance: str
    time_s: float
    def __init__(self, node_id: _Optional[str] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., instance: _Optional[str] = ..., time_s: _Optional[float] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("known", "heartbeat_interval_s")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    known: bool
    heartbeat_interval_s: float
    def __init__(self, known: _Optional[bool] = ..., heartbeat_interval_s: _Optional[float] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("node_id", "instance")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    instance: str
    def __init__(self, node_id: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("digest", "path")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    digest: str
    path: str
    def __init__(self, digest: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class SetAdaptersRequest(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class SetAdaptersResponse(_message.Message):
    __slots__ = ("digests", "failures")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    failures: _containers.ScalarMap[str, str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., failures: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KVEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KVEventsMessage(_message.Message):
    __slots__ = ("number", "batch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    batch: bytes
    def __init__(self, number: _Optional[int] = ..., batch: _Optional[bytes] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "choices", "cache_salt", "adapter", "priority", "client", "router", "orphan_key", "timed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    cache_salt: str
    adapter: str
    priority: int
    client: str
    router: str
    orphan_key: bytes
    timed: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., client: _Optional[str] = ..., router: _Optional[str] = ..., orphan_key: _Optional[bytes] = ..., timed: _Optional[bool] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "output_token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("transfer_id", "epoch", "lease_s", "address", "fingerprint", "block_size", "num_tokens", "first_blocks", "endpoints", "digests", "wait_s")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    epoch: int
    lease_s: float
    address: str
    fingerprint: str
    block_size: int
    num_tokens: int
    first_blocks: _containers.RepeatedScalarFieldContainer[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[RankEndpoint]
    digests: bool
    wait_s: float
    def __init__(self, transfer_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., lease_s: _Optional[float] = ..., address: _Optional[str] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_blocks: _Optional[_Iterable[int]] = ..., endpoints: _Optional[_Iterable[_Union[RankEndpoint, _Mapping]]] = ..., digests: _Optional[bool] = ..., wait_s: _Optional[float] = ...) -> None: ...

class RankEndpoint(_message.Message):
    __slots__ = ("rank", "layer_start", "layer_end", "head_start", "head_end", "endpoint", "group")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    endpoint: bytes
    group: int
    def __init__(self, rank: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., endpoint: _Optional[bytes] = ..., group: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("job", "ticket", "first_token")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    job: Job
    ticket: Ticket
    first_token: TokenEvent
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., first_token: _Optional[_Union[TokenEvent, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_token", "handed_off")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    handed_off: HandedOff
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "cached_tokens", "queue_s", "compute_s", "step_s", "prompt_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: TokenEvent
    cached_tokens: int
    queue_s: float
    compute_s: float
    step_s: float
    prompt_logprobs: PromptLogprobs
    def __init__(self, token: _Optional[_Union[TokenEvent, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., step_s: _Optional[float] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("num_top", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, num_top: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("transfer_s",)
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    transfer_s: float
    def __init__(self, transfer_s: _Optional[float] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("key", "request", "client")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    request: bytes
    client: str
    def __init__(self, key: _Optional[bytes] = ..., request: _Optional[bytes] = ..., client: _Optional[str] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("granted", "kept_at")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    KEPT_AT_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    kept_at: KeptAt
    def __init__(self, granted: _Optional[bool] = ..., kept_at: _Optional[_Union[KeptAt, _Mapping]] = ...) -> None: ...

class TellKeptRequest(_message.Message):
    __slots__ = ("key", "request", "kept_at")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KEPT_AT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    request: bytes
    kept_at: KeptAt
    def __init__(self, key: _Optional[bytes] = ..., request: _Optional[bytes] = ..., kept_at: _Optional[_Union[KeptAt, _Mapping]] = ...) -> None: ...

class TellKeptResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeptAt(_message.Message):
    __slots__ = ("node_id", "local_prefill")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    local_prefill: bool
    def __init__(self, node_id: _Optional[str] = ..., local_prefill: _Optional[bool] = ...) -> None: ...

class FinishChoiceRequest(_message.Message):
    __slots__ = ("request_id", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class FinishChoiceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("job", "local_prefill", "stream", "job_number", "join")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    JOB_NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    job: Job
    local_prefill: bool
    stream: str
    job_number: int
    join: bool
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., local_prefill: _Optional[bool] = ..., stream: _Optional[str] = ..., job_number: _Optional[int] = ..., join: _Optional[bool] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: str
    def __init__(self, stream: _Optional[str] = ...) -> None: ...

class StepEvents(_message.Message):
    __slots__ = ("number", "events")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    events: bytes
    def __init__(self, number: _Optional[int] = ..., events: _Optional[bytes] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("reserved", "landed", "prefilled", "ended", "kept")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    reserved: Ticket
    landed: Landed
    prefilled: Prefilled
    ended: Ended
    kept: Kept
    def __init__(self, reserved: _Optional[_Union[Ticket, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ended(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("status", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    status: int
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, status: _Optional[int] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("cached_tokens", "queue_s", "compute_s", "step_s", "prompt_logprobs")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    queue_s: float
    compute_s: float
    step_s: float
    prompt_logprobs: PromptLogprobs
    def __init__(self, cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., step_s: _Optional[float] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ("bytes", "cached_tokens", "first_token", "data_s", "commit_s", "verify_s", "kv_connectors", "num_digests")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    KV_CONNECTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    cached_tokens: int
    first_token: FirstToken
    data_s: float
    commit_s: float
    verify_s: float
    kv_connectors: _containers.RepeatedScalarFieldContainer[str]
    num_digests: int
    def __init__(self, bytes: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., data_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., kv_connectors: _Optional[_Iterable[str]] = ..., num_digests: _Optional[int] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("choice", "tokens", "finish_reason", "stop_token_id")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    choice: int
    tokens: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Token]
    finish_reason: _inference_pb2.FinishReason
    stop_token_id: int
    def __init__(self, choice: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_inference_pb2.Token, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "first_token", "digests")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    epoch: int
    first_token: FirstToken
    digests: _containers.RepeatedCompositeFieldContainer[RunDigest]
    def __init__(self, transfer_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., digests: _Optional[_Iterable[_Union[RunDigest, _Mapping]]] = ...) -> None: ...

class RunDigest(_message.Message):
    __slots__ = ("sink", "layer_start", "layer_end", "head_start", "head_end", "first_block", "num_blocks", "digest")
    SINK_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    sink: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    first_block: int
    num_blocks: int
    digest: bytes
    def __init__(self, sink: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "committed")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    epoch: int
    committed: bool
    def __init__(self, transfer_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., committed: _Optional[bool] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: int
    def __init__(self, progress: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    epoch: int
    reason: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetargetRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    epoch: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class RetargetResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...
