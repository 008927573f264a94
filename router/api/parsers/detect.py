"""Finds the parsers of a model by the marks in its chat template, for `auto`."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace

from pdserve.common.config.router import AUTO, HARMONY, HARMONY_TOOLS, NONE, ChatConfig

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
    _Row(("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    _Row(("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    # Not deepseek_r1, for which all is a thought until a mark: V3 has such a template and does not
    # think, and models that think write the mark, or their template does.
    _Row(("<｜tool▁calls▁begin｜>", "</think>"), None, "deepseek_v3"),
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
    _Row(("ipython", '{"name": function name, "parameters":'), "llama3_json"),
    _Row(("<function=", "<parameter="), "qwen3_coder"),
    _Row(("<tool_call>",), "hermes"),
    _Row(("<think>",), None, "qwen3"),
)


_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def found_in(template: str) -> tuple[str, str]:
    """Returns the names of the parsers for tool calls and for reasoning; NONE: the template has no
    marks of any."""
    written = _COMMENT.sub("", template)
    rows = [row for row in _ROWS if all(mark in written for mark in row.marks)]
    tools = next((row.tools for row in rows if row.tools), NONE)
    return tools, next((row.reasoning for row in rows if row.reasoning), NONE)


def resolved(config: ChatConfig, template: str) -> ChatConfig:
    """Returns the configuration with names in the place of `auto`. A name that was given excludes
    what goes only with another one. Logs what was found, or a warning that calls stay text."""
    tools, reasoning = found_in(template)
    if config.tool_call_parser != AUTO:
        tools = config.tool_call_parser
    elif config.reasoning_parser == HARMONY:
        tools = HARMONY_TOOLS
    elif tools == HARMONY_TOOLS and config.reasoning_parser != AUTO:
        tools = NONE
    if config.reasoning_parser != AUTO:
        reasoning = config.reasoning_parser
    elif tools == HARMONY_TOOLS:
        reasoning = HARMONY
    elif reasoning == HARMONY and tools != NONE:
        reasoning = NONE
    found = replace(config, tool_call_parser=tools, reasoning_parser=reasoning)
    _log(config, found)
    return found


def _log(config: ChatConfig, found: ChatConfig) -> None:
    logger.info(
        "tool calls are read as %s, reasoning as %s",
        found.calls or "text", found.reasoning or "text",
    )  # fmt: skip
    if config.tool_call_parser == AUTO and found.calls is None and config.enable_auto_tool_choice:
        logger.warning(
            "the chat template shows no known format of tool calls: `tool_choice: auto` is "
            "answered as `none` unless --tool-call-parser names one"
        )
