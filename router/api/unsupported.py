"""Fields that OpenAI, Anthropic or vLLM define and nothing here does. To ignore one would answer
another question than was asked, so it is refused; what nobody defines is ignored, and logged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from pdserve.common.core.errors import InvalidRequest

# By name, the values that ask for nothing (null always does).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "background": (False,),
    "conversation": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Anthropic
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
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
# Those that change no answer: who asks, and what could be made of it elsewhere.
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "spaces_between_special_tokens",
    }
)
ONE_CHOICE = (("n", 1), ("best_of", 1))


def unknown_fields(
    extra: Mapping[str, Any],
    elsewhere: Collection[str] = frozenset(),
    sent_as: Mapping[str, str] = MappingProxyType({}),
) -> frozenset[str]:
    """Of the fields that a body's schema lacks those that nobody defines. `elsewhere` are those
    that other endpoints have; `sent_as`: where the client gave what now has another name.

    Raises:
        InvalidRequest: one of them asks for what is not done here.
    """
    for name, value in extra.items():
        if value is None:
            continue
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            sent = sent_as.get(name, name)
            raise InvalidRequest(f"{sent} is not supported", param=sent)
        if name in elsewhere and value is not False and (name, value) not in ONE_CHOICE:
            raise InvalidRequest(f"{name} is not supported by this endpoint", param=name)
    return frozenset(extra) - UNSUPPORTED.keys() - WITHOUT_EFFECT
