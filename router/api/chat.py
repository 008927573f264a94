"""A chat, for every API and door: how its body becomes a generation, and what its answer says.

Preprocessed ─ chat_from_body ─▶ ChatRequest.generation ─▶ pipeline
TextDelta    ─ ChatChoices.parse ─▶ Content · Reasoning · CallStart · CallArguments
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.common.core.request import FinishReason, new_request_id
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.app_state import AppState
from pdserve.router.api.compat import CompatBody
from pdserve.router.api.ignored import Ignored
from pdserve.router.api.parsers.parser import Event
from pdserve.router.api.parsers.reasoning import AnswerParser
from pdserve.router.api.parsers.thought_count import ThoughtCount
from pdserve.router.api.parsers.tool_parser import ToolParser
from pdserve.router.api.preprocess import Preprocessed, as_chat
from pdserve.router.api.schema import ChatBody
from pdserve.router.api.tools import NAMED, AnswerPlan
from pdserve.router.requests.generation import GenerationRequest, TextDelta
from pdserve.router.requests.queue_bounds import Batch


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat's generation, and what its answer is made with."""

    body: ChatBody
    generation: GenerationRequest
    choices: ChatChoices
    echoed: Sequence[str] = ()  # as `CompatBody.echoed`


def chat_from_body(
    state: AppState, asked: Preprocessed[Any], client: str, prefix: str
) -> ChatRequest:
    """Returns the chat of an HTTP body; the answer's id begins with `prefix`.

    Raises:
        InvalidRequest: a value is out of range.
        ModelNotFound: the model has been unloaded since.
    """
    body, model = asked.body, asked.body.model
    if isinstance(body, CompatBody):
        body = as_chat(body, Ignored(), messages=False)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return make_chat(
        state,
        replace(asked, body=body),
        body.given(logprobs=logprobs),
        request_id=new_request_id(prefix),
        max_tokens=limit,
        client=client,
        model=model,
    )


def make_chat(
    state: AppState,
    asked: Preprocessed[ChatBody],
    given: Mapping[str, Any],
    *,
    request_id: str,
    max_tokens: int | None,
    client: str,
    model: str | None,
) -> ChatRequest:
    """Builds the generation; `given` are the client's parameters by name. Raises as
    `chat_from_body`."""
    (token_ids,), plan, tokenizer = asked.prompts, asked.answer, state.model.tokenizer
    constraint = asked.structured and asked.structured.param
    given = {**given, "grammar": asked.grammar, "constraint": constraint}
    if given.get("skip_special_tokens") is None and plan.shows_special_tokens(state.tool_parser):
        given["skip_special_tokens"] = False
    if state.tool_parser is not None and (stops := _stops(state, state.tool_parser)):
        given["stop_token_ids"] = [*(given.get("stop_token_ids") or ()), *stops]
    generation = state.make_request(
        given,
        request_id=request_id,
        prompt_token_ids=token_ids,
        max_tokens=state.model.fit_max_tokens(len(token_ids), max_tokens, None, "messages"),
        batch=Batch(client, len(token_ids)),
        model=model,
    )
    return ChatRequest(
        asked.body, generation, ChatChoices(plan, state.tool_parser, tokenizer), asked.texts
    )


def _stops(state: AppState, parser: type[ToolParser]) -> list[int]:
    """Returns the tokens that end an answer in this format, where the checkpoint does not say
    so."""
    tokenizer = state.model.tokenizer
    found = [tokenizer.marker(mark) for mark in parser.stop_markers]
    return [each for each in found if each is not None and each not in tokenizer.eos_token_ids]


class ChatChoices:
    """Parses each choice's text into content, reasoning and tool calls."""

    def __init__(
        self, plan: AnswerPlan, tool_parser: type[ToolParser] | None, tokenizer: Tokenizer
    ) -> None:
        """`plan` says what choices have beside text; `tool_parser` reads calls that the model
        makes unasked."""
        self._plan = plan
        self._tool_parser = tool_parser
        self._tokenizer = tokenizer
        self._parsers: dict[int, AnswerParser] = {}  # of the choices that have begun
        self._thoughts: dict[int, ThoughtCount] = {}  # likewise

    @property
    def legacy(self) -> bool:
        """Whether calls have OpenAI's form from before there were tools."""
        return self._plan.legacy

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of all choices' reasoning so far, as `ThoughtCount` counts them."""
        return sum(each.tokens for each in self._thoughts.values())

    def parse(self, delta: TextDelta) -> tuple[list[Event], str | None]:
        """Returns the events of one delta, and the choice's finish reason, if this is its last."""
        if (parser := self._parsers.get(delta.choice)) is None:
            parser = self._parsers[delta.choice] = self._plan.parser(self._tool_parser)
            thought = ThoughtCount(self._plan.reasoning, self._tokenizer, self._plan.thinking)
            self._thoughts[delta.choice] = thought
        events = parser.push(delta.text, final=delta.finish_reason is not None)
        self._thoughts[delta.choice].add((each.token_id for each in delta.tokens), events)
        return events, self._finish_reason(delta, parser)

    def _finish_reason(self, delta: TextDelta, parser: AnswerParser) -> str | None:
        """`tool_calls` where the model called tools and then stopped. As in OpenAI's API, a call
        that a stop string or the limit cut short does not count, nor does one of a tool that the
        client named itself."""
        stopped = delta.finish_reason is FinishReason.STOP
        if not (stopped and parser.called) or self._plan.tool_choice == NAMED:
            return delta.finish_reason
        cut = parser.in_call and isinstance(delta.stop_reason, str)
        return delta.finish_reason if cut else "tool_calls"
