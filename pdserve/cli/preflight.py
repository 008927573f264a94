"""Checks a local cluster's options before anything starts: by the checks of its roles, here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from pdserve.cli.host_share import role_sizes, visible_gpus
from pdserve.cli.model import check as check_model
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import bind
from pdserve.common.core.lora import read_adapter
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.plugins import import_string
from pdserve.common.planning.kv_budget import parse_bytes
from pdserve.common.planning.role_plan import NodeSetup

# Who resolves what an option names. The router checks it, too; named here, not imported.
_TOOL_PARSER = "pdserve.router.api.parsers.tool_parser:tool_parser"
_POLICY = "pdserve.router.cluster.policies:load_policy"
_TEMPLATE = "pdserve.router.cluster.served_model:load_template"
_HTTPS = "pdserve.router.http.server:https_context"


def check_host(config: ClusterConfig) -> None:
    """Checks names, files, ports and GPUs, before a model is downloaded or unpacked.

    Raises:
        ConfigError: a process could not start with these options.
    """
    _check_names(config)
    if config.on == "host":  # Ray's hosts have other ports and GPUs
        _check_ports(config)
        _check_gpus(config)


def check_checkpoint(config: ClusterConfig) -> None:
    """Checks the model, which `config` names by its folder, and how nodes split it. Models that run
    through transformers are split by rules that only nodes know.

    Raises:
        ConfigError: a process could not start with this model.
    """
    model, lora = config.engine.model, config.engine.lora
    assert model.model is not None, "resolve_model first"
    folder = Path(model.model)
    with _naming("--model"):
        spec = check_model(folder, model.model_impl, model.overrides)
    native = spec if isinstance(spec, ModelSpec) else None
    if native is not None:
        _check_split(config, native)
    lora.check_names(model.served_model_name or [model.served_name])
    for name, path in lora.modules.items():
        with _naming(f"--lora-modules {name}"):
            read_adapter(path, native, lora.max_lora_rank)


def _check_names(config: ClusterConfig) -> None:
    if config.chat.calls is not None:
        with _naming("--tool-call-parser"):
            import_string(_TOOL_PARSER)(config.chat.calls)
    load_policy = import_string(_POLICY)
    load_policy(config.routing.prefill_policy, "--prefill-policy")
    load_policy(config.routing.decode_policy, "--decode-policy")
    if config.engine.model.chat_template is not None:
        import_string(_TEMPLATE)(config.engine.model.chat_template)
    if config.server.ssl_certfile is not None:
        import_string(_HTTPS)(config.server)
    if config.engine.cache.kv_cache_memory is not None:
        parse_bytes(config.engine.cache.kv_cache_memory)


def _check_ports(config: ClusterConfig) -> None:
    server = config.server
    ports = {
        "--port": (server.port, "HTTP"),
        "--grpc-port": (server.grpc_port, "gRPC"),
        "--registry-port": (server.registry_port, "nodes"),
    }
    given: dict[int, str] = {}
    for flag, (port, purpose) in ports.items():
        if port and (other := given.setdefault(port, flag)) != flag:
            raise ConfigError(
                f"{other} and {flag} are both {port}: choose two ports (0: free ones)"
            )
        if port:
            bind(server.host, port, purpose, flag).close()


def _check_gpus(config: ClusterConfig) -> None:
    parallel = config.engine.parallel
    several_hosts = parallel.distributed_executor_backend == "ray" or find_spec("ray") is not None
    gpus = visible_gpus(parallel.device)
    if several_hosts or not gpus:
        return
    for role, size in role_sizes(config).items():
        if config.nodes[role] and size.world_size_across_dp > len(gpus):
            raise ConfigError(
                f"a {role} node has {size.world_size_across_dp} ranks ({_flags(config, role)}) and "
                f"this host shows {len(gpus)} GPUs: lower its sizes, show more GPUs "
                "(CUDA_VISIBLE_DEVICES), or pass --device cpu"
            )


def _flags(config: ClusterConfig, role: str) -> str:
    size, own = role_sizes(config)[role], _own_flags(config, role)
    sizes = {
        "--tensor-parallel-size": size.tensor_parallel_size,
        "--pipeline-parallel-size": size.pipeline_parallel_size,
        "--data-parallel-size": size.data_parallel_size,
    }
    return " ".join(f"{own.get(flag, flag)} {value}" for flag, value in sizes.items() if value > 1)


def _own_flags(config: ClusterConfig, role: str) -> Mapping[str, str]:
    """Returns the flags of the role that take the place of general ones."""
    own = {"--tensor-parallel-size": "tp", "--pipeline-parallel-size": "pp"}
    return {
        flag: f"--{role}-{short}"
        for flag, short in own.items()
        if getattr(config, f"{role}_{short}", None) is not None
    }


def _check_split(config: ClusterConfig, spec: ModelSpec) -> None:
    engine = config.engine
    context = engine.model.context(spec.max_position_embeddings)
    for role, size in role_sizes(config).items():
        if config.nodes[role]:
            nodes = replace(engine, parallel=size)
            with _renaming(_own_flags(config, role)):
                NodeSetup(spec.quantized(engine.model.quantization), nodes, context, 0).check()


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    """Puts the flag before an error's message unless it has it."""
    try:
        yield
    except ConfigError as error:
        if flag.partition(" ")[0] in error.message:
            raise
        raise ConfigError(f"{flag}: {error.message}") from error


@contextmanager
def _renaming(flags: Mapping[str, str]) -> Iterator[None]:
    """Replaces flags in an error's message."""
    try:
        yield
    except ConfigError as error:
        message = error.message
        for general, own in flags.items():
            message = message.replace(general, own)
        raise ConfigError(message) from error
