"""Finds the parsers of a model by the marks in its chat template, for `auto`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from pdserve.common.config.router import AUTO, HARMONY, HARMONY_TOOLS, ChatConfig
from pdserve.common.core.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Row:
    """A template with all of these marks has these parsers."""

    marks: tuple[str, ...]
    tools: str | None = None
    reasoning: str | None = None


# The first row that fits counts, for tools and for reasoning each.
_ROWS = (
    _Row(("<|channel|>", "<|message|>"), HARMONY_TOOLS, HARMONY),
    _Row(("<|tool_calls_section_begin|>", "<think>"), "kimi_k2", "kimi_k2"),
    _Row(("<|tool_calls_section_begin|>",), "kimi_k2"),
    _Row(("<｜DSML｜",), "deepseek_v32", "deepseek_v3"),
    _Row(("<｜tool▁calls▁begin｜>", "```json", "</think>"), "deepseek_v3", "deepseek_r1"),
    _Row(("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    _Row(("<｜tool▁calls▁begin｜>", "</think>"), "deepseek_v31", "deepseek_v3"),
    _Row(("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    _Row(("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    _Row(("<seed:tool_call>",), "seed_oss", "seed_oss"),
    _Row(("<arg_key>",), "glm45", "glm45"),
    _Row(("<|tool_call>", "<|channel>"), "gemma4", "gemma4"),
    _Row(("<start_function_call>",), "functiongemma"),
    _Row(("[TOOL_CALLS]", "[THINK]"), "mistral", "mistral"),
    _Row(("[TOOL_CALLS]",), "mistral"),
    _Row(("<|tool_call|>", "thought process"), "granite", "granite"),
    _Row(("functools",), "phi4_mini_json"),
    _Row(("<|tool_call|>",), "granite"),
    _Row(("<|python_start|>",), "llama4_pythonic"),
    _Row(("<|python_tag|>",), "llama3_json"),
    _Row(("<function=", "<parameter="), "qwen3_coder"),
    _Row(("<tool_call>",), "hermes"),
    _Row(("<think>",), None, "qwen3"),
)


def found_in(template: str) -> tuple[str | None, str | None]:
    """Returns the names of the parsers for tool calls and for reasoning; None: the template has no
    marks of any."""
    rows = [row for row in _ROWS if all(mark in template for mark in row.marks)]
    tools = next((row.tools for row in rows if row.tools), None)
    return tools, next((row.reasoning for row in rows if row.reasoning), None)


def resolved(config: ChatConfig, template: str) -> ChatConfig:
    """Returns the configuration with names in the place of `auto`.

    Raises:
        ConfigError: the template shows no format of tool calls, or two that exclude each other.
    """
    if AUTO not in (config.tool_call_parser, config.reasoning_parser):
        return config
    tools, reasoning = found_in(template)
    if config.tool_call_parser == AUTO:
        if tools is None:
            raise ConfigError(
                "--tool-call-parser auto finds no known format of calls in the chat template: name "
                "the parser"
            )
        config = replace(config, tool_call_parser=tools)
    if config.reasoning_parser == AUTO:
        config = replace(config, reasoning_parser=reasoning)
    logger.info(
        "tool calls are read as %s, reasoning as %s",
        config.tool_call_parser or "text",
        config.reasoning or "text",
    )
    return config
