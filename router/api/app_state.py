"""The state that the HTTP and gRPC doors share; it turns a client's request into a generation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pdserve.common.config.router import ChatConfig
from pdserve.common.core.errors import InvalidRequest, Overloaded, PdserveError, Unavailable
from pdserve.common.core.parameters import PARAMETERS
from pdserve.common.core.request import new_request_id
from pdserve.common.core.structured import StructuredOutput
from pdserve.common.core.throttle import LogThrottle
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.text.opening import opened
from pdserve.router.api.auth import APIKeys
from pdserve.router.api.conversation import CostlyTemplate, Templates
from pdserve.router.api.grammar_compiler import Compiled, GrammarCompiler, compile_here
from pdserve.router.api.parsers.tool_parser import ToolParser
from pdserve.router.api.preprocess import BodyBuffer, Preprocessed, Preprocessor
from pdserve.router.api.preprocess_workers import PreprocessWorkers
from pdserve.router.api.sampling import make_choices, make_sampling, make_stop
from pdserve.router.cluster.adapters import ServedAdapters
from pdserve.router.cluster.served_model import ServedModel
from pdserve.router.requests.brake import RefusalBrake
from pdserve.router.requests.fair_share import FairExecutor
from pdserve.router.requests.generation import GenerationRequest
from pdserve.router.requests.pipeline import Pipeline
from pdserve.router.requests.queue_bounds import Batch

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16  # for a completion
INLINE = 4 * 1024  # bytes of a body that takes less than a few milliseconds
SMALL = 64 * 1024  # bytes of a body that a thread may take
THREADS = 4  # that take bodies at the same time
MAX_WAITING = 4096  # bodies that wait for a thread
_UNREAD_PERIOD = 60.0  # seconds between two warnings that calls are not read
_MAX_NAMES = 1000  # that the log remembers; clients choose them


def stopping() -> Unavailable:
    """Returns the error for requests while this process ends: another router may serve them."""
    return Unavailable("the server is shutting down", code="SHUTTING_DOWN")


class IgnoredLog:
    """Logs each name of what requests have in vain once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Collection[str]) -> None:
        new = set(names) - self._seen
        logged = sorted(new)[: _MAX_NAMES - len(self._seen)]
        if logged:
            self._seen.update(logged)
            logger.info("ignored in requests: %s", ", ".join(logged))


class CacheEpoch:
    """A part of every cache salt that changes with a reset: from then on no request finds blocks
    that were computed before. Nodes use these blocks again when they need room."""

    def __init__(self) -> None:
        self._since = ""

    def reset(self, since: str = "") -> str:
        """Returns the new part, which all routers that share prefixes must have."""
        self._since = since or new_request_id("since")
        return self._since

    def salt(self, own: str) -> str:
        return f"{self._since} {own}" if self._since else own


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """The pipeline, the model, the API keys, and everything else that a door needs."""

    pipeline: Pipeline
    served: ServedModel  # as this router's options say; `model` is what nodes hold of it
    window: Callable[[], int | None] = lambda: None  # tokens, the least of the nodes'
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    keys: APIKeys = field(default_factory=APIKeys)
    chat: ChatConfig = field(default_factory=ChatConfig)
    priorities: bool = False  # --scheduling-policy priority
    tool_parser: type[ToolParser] | None = None  # --tool-call-parser
    # None: threads take large bodies and costly templates, too, without bounds.
    workers: PreprocessWorkers | None = None
    ignored_log: IgnoredLog = field(default_factory=IgnoredLog)
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    cache_epoch: CacheEpoch = field(default_factory=CacheEpoch)
    event_keys: tuple[bytes, ...] = ()  # for the ids of events; none: no stream can be resumed
    refusals: RefusalBrake = field(default_factory=RefusalBrake)
    overloads: LogThrottle = field(default_factory=lambda: LogThrottle(logger))
    unread_calls: LogThrottle = field(default_factory=lambda: LogThrottle(logger, _UNREAD_PERIOD))
    grammar: GrammarCompiler = field(init=False)
    threads: FairExecutor = field(
        init=False, default_factory=lambda: FairExecutor(THREADS, MAX_WAITING)
    )

    def __post_init__(self) -> None:
        compile = self._compile if self.workers is None else self.workers.compile
        observe = self.metrics.grammar_seconds.observe
        object.__setattr__(self, "grammar", GrammarCompiler(compile, observe))

    @property
    def model(self) -> ServedModel:
        """The model, with a context window that every registered node holds."""
        return self.served.within(self.window())

    async def _compile(self, structured: StructuredOutput, client: str) -> Compiled:
        return await asyncio.to_thread(compile_here, structured, self.model)

    async def preprocess(self, kind: str, raw: BodyBuffer, client: str) -> Preprocessed[Any]:
        """Preprocesses a JSON body of one of `preprocess.KINDS`; `raw` is used up.

        Raises:
            PdserveError: as `Preprocessor.preprocess`, or too many bodies wait.
        """
        result = await self._preprocess(kind, raw, client)
        self.ignored_log.note(result.ignored)
        if result.answer.unread:
            self.unread_calls.warning(
                "a request has tools, but calls stay text: no --tool-call-parser is known for "
                "this model's chat template, or it is none"
            )
        if result.structured is None:
            return result
        grammar = await self.grammar(result.structured, client)
        return replace(result, grammar=opened(grammar, result.answer.opening))

    async def _preprocess(self, kind: str, raw: BodyBuffer, client: str) -> Preprocessed[Any]:
        adapters, workers = self.adapters.names(), self.workers
        if workers is not None and len(raw) > SMALL:
            return await workers.preprocess(kind, raw, client, adapters, window=self.window())
        templates: Templates = "here" if workers is None else "elsewhere"
        preprocessor = Preprocessor(self.model, self.chat, adapters, templates)
        try:
            if len(raw) <= INLINE:
                return preprocessor.preprocess(kind, raw.whole())
            work = partial(asyncio.to_thread, preprocessor.preprocess, kind, raw.whole())
            return await self.threads.run(client, work)
        except CostlyTemplate:
            assert workers is not None
            return await workers.preprocess(
                kind, raw, client, adapters, costly=True, window=self.window()
            )

    async def brake(self, error: PdserveError, client: str) -> None:
        """Waits before an answer that refuses a client for lack of room: longer and longer if there
        are many."""
        if isinstance(error, Overloaded):
            self.overloads.warning("a client is refused: %s", error.message)
            await asyncio.sleep(self.refusals.delay(client))

    def refused(self, error: PdserveError, client: str, http_status: int | None = None) -> None:
        """Counts a request that fails, and lists it among the last requests, unless the pipeline
        has done so."""
        if not error.counted:
            self.metrics.observe_error(error)
            self.pipeline.timelines.refused(error, client, http_status)

    def response_model(self, name: str | None) -> str:
        """Returns the model's name in a response to a request for `name`: an adapter's own, or the
        model's first.

        Raises:
            ModelNotFound: there is no such model.
        """
        if (adapter := self.adapters.find(name)) is not None:
            return adapter.name
        self.model.check_name(name)
        return self.model.name

    def make_request(
        self,
        given: Mapping[str, Any],
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        batch: Batch,
        model: str | None = None,
        prompt_only: bool = False,
        before: Sequence[int] = (),
    ) -> GenerationRequest:
        """Builds a generation. `given` are the client's parameters by name; None means absent.
        `model` is the name that the client asked for. `before`: as `GenerationRequest` has it.

        Raises:
            InvalidRequest: a value is out of range.
            ModelNotFound: there is no such model, or it has been unloaded since.
        """
        if (adapter := self.adapters.find(model)) is None:
            self.model.check_name(model)
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=make_sampling(given, self.model, max_tokens),
            n=make_choices(given.get("n")),
            stop=make_stop(given.get("stop")),
            include_stop_str_in_output=bool(given.get("include_stop_str_in_output")),
            skip_special_tokens=given.get("skip_special_tokens") is not False,
            priority=self._priority(given.get("priority") or 0),
            cache_salt=self.cache_epoch.salt(
                self.keys.cache_salt(batch.client, given.get("cache_salt"))
            ),
            adapter=adapter,
            batch=batch,
            prompt_only=prompt_only,
            constraint=given.get("constraint") or "",
            before=before,
        )

    def _priority(self, given: int) -> int:
        PARAMETERS["priority"].check_range(given)
        if given and not self.priorities:
            raise InvalidRequest(
                "priority needs a server with --scheduling-policy priority", param="priority"
            )
        return given
