"""Fields and tools that no schema has: which are refused, which are left out, and a list of the
latter for the client.

To leave out what changes the answer would answer another question than the client asked: that is
refused. Agents send much that a model server has no part in, such as tools of the provider's own;
that is left out, and named in a header. `--strict-parameters` refuses it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from pdserve.common.core.errors import InvalidRequest

# Each by name, with the values that ask for nothing, as null does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "background": (False,),
    "conversation": (),
    "modalities": (["text"],),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    # vLLM
    "early_stopping": (False,),
    "echo": (False,),
    "enable_response_messages": (False,),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "previous_input_messages": ([],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "return_token_strs": (False,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
LEFT_OUT: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "prediction": (),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Anthropic
    "container": (),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
}
# Fields that change no answer.
WITHOUT_EFFECT = frozenset({
    "anthropic_version", "betas", "cache_control", "client_metadata", "metadata",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "spaces_between_special_tokens",
})  # fmt: skip
MAX_NAMES, MAX_NAME = 100, 64  # that are remembered of a request, and their characters
_ONE_CHOICE = (("n", 1), ("best_of", 1))


class Ignored:
    """Lists what is left out of one request."""

    def __init__(self, strict: bool = False) -> None:
        """`strict`: what would be left out is refused."""
        self._strict = strict
        self._names: dict[str, None] = {}
        self.tools = set[str]()  # names and types of tools

    @property
    def names(self) -> tuple[str, ...]:
        """The first paths in the client's body, cut short; a tool's ends with its name or type."""
        return tuple(name[:MAX_NAME] for name in list(self._names)[:MAX_NAMES])

    def add(self, name: str, param: str | None = None) -> None:
        """`param`: the path of the field, if it is not `name`.

        Raises:
            InvalidRequest: nothing may be left out.
        """
        if self._strict:
            raise InvalidRequest(
                f"{name} is not supported, and this server ignores nothing (--strict-parameters)",
                param=param or name,
            )
        self._names[name] = None

    def add_tool(self, tool: Mapping[str, Any], index: int) -> None:
        """Adds a tool of a type other than function. Raises as `add`."""
        kind, own = tool["type"], tool.get(tool["type"])
        named = own if isinstance(own, dict) else tool
        name = named.get("name") or named.get("server_label")
        name = name if isinstance(name, str) else kind
        self.add(f"tools.{name}", f"tools[{index}]")
        self.tools |= {name, kind}

    def fields(
        self,
        extra: Mapping[str, Any] | None,
        elsewhere: Collection[str] = frozenset(),
        sent_as: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Adds the fields of a body that its schema lacks. `elsewhere` are fields of other
        endpoints; `sent_as` maps a field's name here to its path in the client's body.

        Raises:
            InvalidRequest: a field requests something that this server does not do.
        """
        for name, value in (extra or {}).items():
            if value is None or name in WITHOUT_EFFECT:
                continue
            sent = sent_as.get(name, name)
            if name in UNSUPPORTED:
                if value not in UNSUPPORTED[name]:
                    raise InvalidRequest(f"{sent} is not supported", param=sent)
            elif name in elsewhere:
                if value is not False and (name, value) not in _ONE_CHOICE:
                    raise InvalidRequest(f"{name} is not supported by this endpoint", param=name)
            elif value not in LEFT_OUT.get(name, ()):
                self.add(sent)
