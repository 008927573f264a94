"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from aiohttp import web

from common.core.errors import InvalidRequest
from common.core.ids import new_request_id
from common.core.sampling import check_range
from common.text.tokenizer import Tokenizer
from router.admission import Batch
from router.generation import TextDelta
from router.http.front import FRONT, Front, read_body
from router.http.generation_body import check_response_format, make_request, reply_options
from router.http.logprobs import chat_logprobs
from router.http.reply import Reply
from router.http.schema import ChatBody, ChatTemplateBody, Message
from router.served_model import off_loop


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    body = await read_body(request, ChatBody)
    _check_supported(body)
    token_ids = await encode_messages(front, body, body.messages)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generation = make_request(
        body,
        front,
        request_id=new_request_id("chatcmpl"),
        prompt_token_ids=token_ids,
        max_tokens=front.model.fit_max_tokens(len(token_ids), limit, None, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        batch=Batch(front.client(request), len(token_ids)),
    )
    reply = Reply(
        id=generation.request_id,
        model=front.model.name,
        wording=ChatWording(front.model.tokenizer if body.logprobs else None),
        requests=[generation],
        **reply_options(request, body),
    )
    return await reply.respond(request, front.generator)


async def encode_messages(
    front: Front, body: ChatTemplateBody, messages: list[Message]
) -> tuple[int, ...]:
    """The conversation as token ids, through the chat template.

    Raises:
        InvalidRequest: no messages, or the template refuses them.
    """
    if not messages:
        raise InvalidRequest("messages is an empty list", param="messages")
    if body.chat_template is not None and not front.trust_request_chat_template:
        raise InvalidRequest(
            "this server does not run clients' chat templates "
            "(--trust-request-chat-template allows them)",
            param="chat_template",
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    return await off_loop(
        sum(len(str(message.content)) for message in messages),
        lambda: front.model.tokenizer.apply_chat_template(
            [_as_template_message(message) for message in messages],
            add_generation_prompt=not body.continue_final_message
            and body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            chat_template=body.chat_template,
            template_kwargs=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        ),
    )


def _as_template_message(message: Message) -> dict[str, Any]:
    """OpenAI's newer name for `system` is in no open model's template."""
    role = "system" if message.role == "developer" else message.role
    return {"content": "", **message.model_dump(exclude_none=True), "role": role}


def _check_supported(body: ChatBody) -> None:
    check_response_format(body)
    if body.tools:
        raise InvalidRequest("tools are not supported yet", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice is not supported yet", param="tool_choice")
    if body.max_completion_tokens is not None:
        check_range("max_completion_tokens", body.max_completion_tokens, 1, None)
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, 0, 20)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


class ChatWording:
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """With a tokenizer, choices carry log-probabilities."""
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": whole.text}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """The role first, once; then content; the finish reason in an event of its own."""
        if index not in self._begun:
            self._begun.add(index)
            yield _chunk(index, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta)
        if delta.text or (logprobs and delta.tokens):
            yield _chunk(index, {"content": delta.text}) | {"logprobs": logprobs}
        if delta.finish_reason:
            ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield _chunk(index, {}) | ending

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        return chat_logprobs(delta.tokens, self._tokenizer) if self._tokenizer else None


def _chunk(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
