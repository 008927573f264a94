"""The gRPC API: it serves the same generations as HTTP, without JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import grpc
from google.protobuf.message import Message
from msgspec.json import encode

from pdserve.common.core.errors import Cancelled, InvalidRequest, PdserveError
from pdserve.common.core.request import is_plain_id, new_request_id
from pdserve.common.obs.logging import request_id_var
from pdserve.common.obs.tracing import PARENT, plain_parent
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from pdserve.common.rpc.status import serving as answering
from pdserve.router.api.app_state import DEFAULT_MAX_TOKENS, INLINE, AppState, stopping
from pdserve.router.api.chat import ChatChoices, make_chat
from pdserve.router.api.preprocess import BodyBuffer, failed
from pdserve.router.api.structured import from_structured_outputs
from pdserve.router.cluster.served_model import ServedModel
from pdserve.router.grpc.chat import chat_fields, structured_fields
from pdserve.router.grpc.door import AUTHORIZATION, client_of, details, message_done, metadata_of
from pdserve.router.grpc.response import ResponseWriter
from pdserve.router.grpc.resume import idempotent, resumable
from pdserve.router.requests.generation import GenerationRequest
from pdserve.router.requests.keyed import IDEMPOTENCY_KEY
from pdserve.router.requests.queue_bounds import Batch
from pdserve.router.requests.slo import slo_of
from pdserve.router.requests.stages import SESSION_ID, RequestArrival, arrival_var

Context = grpc.aio.ServicerContext[Any, Any]

Write = Callable[[pb.GenerateResponse], Awaitable[None]]

logger = logging.getLogger(__name__)

QUIET = 2.0
_CANCEL_TIMEOUT = 2.0  # seconds that calls get to send the error with which they are cut off


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """`pdserve.v1.Inference`, for calls that a `ClientDoor` has admitted."""

    def __init__(self, state: AppState, write_timeout: float = 30.0) -> None:
        self._state = state
        self._write_timeout = write_timeout
        self._in_flight: set[asyncio.Task[Any]] = set()  # of Generate
        self._cut_off: set[asyncio.Task[Any]] = set()
        self._called = -inf  # when Generate was last called

    async def quiet(self, timeout: float, has_balancer: bool = False) -> None:
        """Waits until nothing has been asked for `QUIET` seconds, or `timeout` is over: balancers
        take that long to see that this router is not healthy any more. `has_balancer`: that is
        known, so that at least these are waited for."""
        until = monotonic() + timeout
        if has_balancer:
            self._called = monotonic()
        while (wait := min(self._called + QUIET, until) - monotonic()) > 0:
            await asyncio.sleep(wait)

    async def drain(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for generations in flight, then ends them; their clients
        get an error."""
        if self._in_flight:
            await asyncio.wait({*self._in_flight}, timeout=timeout)
        if late := {*self._in_flight}:
            logger.warning("cut off %d calls in flight", len(late))
            self._cut_off |= late
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=_CANCEL_TIMEOUT)

    @property
    def _model(self) -> ServedModel:
        return self._state.model

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Streams deltas; the last response carries usage and timeline only."""
        outline = _outline(request)
        async with (
            answering(context, details=partial(details, request=outline)),
            self._writing(context) as write,
            self._counted(context),
            self._drained(),
        ):
            if is_plain_id(request.request_id):
                request_id_var.set(request.request_id)  # errors carry it, too
            arrival_var.set(
                RequestArrival(
                    read=monotonic(),
                    wants_timeline=request.timeline,
                    operation="chat" if request.HasField("chat") else "text_completion",
                    traceparent=plain_parent(metadata_of(context, PARENT)),
                    slo=slo_of(lambda name: metadata_of(context, name.lower())),
                    session=metadata_of(context, SESSION_ID) or "",
                )
            )
            client = client_of(self._state.keys, context)
            self._state.pipeline.check_room(client)
            generation, choices = await self._make_request(request, client)
            key = metadata_of(context, AUTHORIZATION) or ""
            given = metadata_of(context, IDEMPOTENCY_KEY.lower())
            generation, writer = await self._writer(request, key, given, generation, choices)
            request_id_var.set(writer.id)
            del request  # it may be much larger than the generation
            message_done()
            async with aclosing(self._state.pipeline.generate([generation])) as updates:
                async for batch in updates:
                    async for response in writer.write(batch):
                        await write(response)

    async def _writer(
        self,
        request: pb.GenerateRequest,
        api_key: str,
        key: str | None,
        generation: GenerationRequest,
        choices: ChatChoices | None,
    ) -> tuple[GenerationRequest, ResponseWriter]:
        """Returns the generation, which goes on where the client is if it resumes a stream, and is
        made once if there is an Idempotency-Key, and what writes its responses. Raises as
        `resume.resumable` and `resume.idempotent`."""
        if keyed := idempotent(self._state.event_keys, request, api_key, key, generation):
            generation = keyed
        public_id = request.request_id or generation.request_id
        prompt = generation.prompt_token_ids if request.return_token_ids else ()
        found = await resumable(self._state.event_keys, request, api_key, generation, public_id)
        if found is None:
            return generation, ResponseWriter(public_id, generation, choices, prompt)
        if request.resume:
            prompt = ()  # the client has them
        (generation,) = found.generations
        return generation, ResponseWriter(found.drawn.id, generation, choices, prompt, found.ids)

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Has `drain` wait for this call. Raises Unavailable: it is cut off."""
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        self._called = monotonic()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._cut_off:
                raise
            task.uncancel()
            raise stopping() from None
        finally:
            self._in_flight.discard(task)
            self._cut_off.discard(task)

    @asynccontextmanager
    async def _counted(self, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except PdserveError as error:
            client = client_of(self._state.keys, context)
            self._state.refused(error, client)
            await self._state.brake(error, client)
            raise

    @asynccontextmanager
    async def _writing(self, context: Context) -> AsyncIterator[Write]:
        """Yields a function that writes a response; it waits for a slow client, within a bound."""
        first: asyncio.Future[None] | None = None

        async def write(response: pb.GenerateResponse) -> None:
            nonlocal first
            try:
                async with asyncio.timeout(self._write_timeout):
                    if first is None:
                        first = asyncio.ensure_future(context.write(response))
                        await asyncio.shield(first)
                    else:
                        await context.write(response)
            except TimeoutError:
                logger.info("%s did not read for %.0f s", context.peer(), self._write_timeout)
                raise Cancelled("the client did not read", code="CLIENT_TOO_SLOW") from None

        try:
            yield write
        except Cancelled:
            # The client gets the error when it reads again; until then only the call is kept. The
            # first write has the call's headers: if it were cancelled half-way, gRPC would send
            # them twice, and so fail to end the call.
            if first is not None:
                await asyncio.wait([first])
            raise
        finally:
            if first is not None:
                first.cancel()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering(context, details=partial(details, request=request)):
            client = client_of(self._state.keys, context)
            asked: dict[str, Any] = {"model": request.model or None}
            if request.HasField("add_special_tokens"):
                asked["add_special_tokens"] = request.add_special_tokens
            match request.WhichOneof("prompt"):
                case "text":
                    body = BodyBuffer(encode({**asked, "prompt": request.text}))
                case "chat":
                    fields = partial(chat_fields, request.chat, {})
                    body = await self._body(request, lambda: asked | fields(), client)
                case _:
                    raise InvalidRequest("give text or chat", param="prompt")
            (ids,) = (await self._state.preprocess("tokenize", body, client)).prompts
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._model.max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with answering(context, details=partial(details, request=request)):
            client = client_of(self._state.keys, context)
            asked: dict[str, Any] = {"model": request.model or None}
            tokens = request.token_ids
            body = await self._body(request, lambda: asked | {"tokens": list(tokens)}, client)
            (text,) = (await self._state.preprocess("detokenize", body, client)).texts
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            id=self._model.name,
            max_model_len=self._model.max_model_len,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.tokenizer.eos_token_ids,
            root=self._model.root,
        )

    async def _make_request(
        self, request: pb.GenerateRequest, client: str = ""
    ) -> tuple[GenerationRequest, ChatChoices | None]:
        """Returns the generation, and for a chat the parser of its choices."""
        if request.request_id and not is_plain_id(request.request_id):
            raise InvalidRequest("request_id must be a word of ASCII", param="request_id")
        self._state.response_model(request.model or None)
        given = convert.fields_set(request.sampling)
        if "grammar" in given:
            raise InvalidRequest("grammar is not for clients", param="grammar")
        if request.HasField("chat"):
            return await self._chat(request, given, client)
        token_ids = self._model.truncate(
            await self._prompt(request, client),
            given.get("truncate_prompt_tokens"),
            given.get("max_tokens"),
        )
        if "structured_outputs" in given:
            structured = from_structured_outputs(structured_fields(given["structured_outputs"]))
            assert structured is not None, "it is given"
            given["grammar"] = await self._state.grammar(structured, client)
            given["constraint"] = structured.param
        max_tokens = self._model.fit_max_tokens(
            len(token_ids), given.get("max_tokens"), DEFAULT_MAX_TOKENS, "prompt"
        )
        generation = self._state.make_request(
            _given(request, given),
            # The client's id need not be unique; ours names the request on the nodes.
            request_id=new_request_id("gen"),
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            batch=Batch(client, len(token_ids)),
            model=request.model or None,
        )
        return generation, None

    async def _chat(
        self, request: pb.GenerateRequest, given: dict[str, Any], client: str
    ) -> tuple[GenerationRequest, ChatChoices]:
        body = await self._body(request, lambda: chat_fields(request.chat, given), client)
        chat = make_chat(
            self._state,
            await self._state.preprocess("chat", body, client),
            _given(request, given),
            request_id=new_request_id("gen"),
            max_tokens=given.get("max_tokens"),
            client=client,
            model=request.model or None,
        )
        return chat.generation, chat.choices

    async def _body(
        self, request: Message, fields: Callable[[], dict[str, Any]], client: str
    ) -> BodyBuffer:
        """Returns the JSON body for the same request. A thread makes it from a large message;
        clients take turns."""

        def make() -> bytes:
            try:
                return encode(fields())
            except (RecursionError, UnicodeError, OverflowError) as error:  # the values cause them
                raise failed(error) from error

        if request.ByteSize() <= INLINE:
            return BodyBuffer(make())
        return BodyBuffer(await self._state.threads.run(client, partial(asyncio.to_thread, make)))

    async def _prompt(self, request: pb.GenerateRequest, client: str) -> Sequence[int]:
        match request.WhichOneof("prompt"):
            case "text":
                body = BodyBuffer(encode({"prompt": request.text}))
                return (await self._state.preprocess("tokenize", body, client)).prompts[0]
            case "token_ids":
                return self._model.check_prompt(request.token_ids.ids, "token_ids")
            case _:
                raise InvalidRequest("give text, token_ids or chat", param="prompt")


def _given(request: pb.GenerateRequest, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the client's parameters by name, as `AppState.make_request` takes them."""
    return {**sampling, "cache_salt": request.cache_salt or None, "priority": request.priority}


def _outline(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Returns the request's kind of prompt without its contents, for the paths of wrong fields."""
    outline = pb.GenerateRequest()
    match request.WhichOneof("prompt"):
        case "text":
            outline.text = ""
        case "token_ids" | "chat" as kind:
            getattr(outline, kind).SetInParent()
    return outline
