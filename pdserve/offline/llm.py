"""`LLM`: a whole cluster as an object that answers lists of prompts, after vLLM's `LLM`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from numbers import Integral
from operator import index
from os import PathLike, fspath
from typing import Any, TypeVar

from tqdm.auto import tqdm

from pdserve.common.config.cluster import ClusterConfig, private_cluster
from pdserve.common.config.options import with_values
from pdserve.common.core.errors import InvalidRequest, PdserveError
from pdserve.offline.local import TRIES, LocalCluster
from pdserve.offline.lora import Adapter, LoadedAdapters, LoRARequest, listed
from pdserve.offline.outputs import RequestOutput, read_output
from pdserve.offline.params import SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""
Message = Mapping[str, Any]
Answering = Coroutine[Any, Any, RequestOutput]

TIMELINE = {"X-Pdserve-Timeline": "1"}


class LLM:
    """A cluster as `pdserve up` starts it, on free ports of this host; `options` are its flags.

    Use it as a context manager or call `close`; it also ends when this process ends.

    >>> with LLM(model="/models/Qwen3-8B", prefill=1, decode=1) as llm:
    ...     outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=20))

    Raises:
        ConfigError: an option is unknown, or the cluster cannot start with these options.
        NodeError: a process of the cluster died during the start.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = fspath(model)
        if options.get("enable_lora"):
            options.setdefault("runtime_lora_dir", "/")  # the caller may name any folder
        config = with_values(private_cluster(), options)
        self._adapters = LoadedAdapters(config.engine.lora)
        self._cluster = LocalCluster(config)
        self._places = places(self._cluster.config)
        # Also runs at interpreter exit, on the main thread: `close` joins the cluster's thread.
        self._end = weakref.finalize(self, self._cluster.close)

    @property
    def url(self) -> str:
        """The URL of the cluster's HTTP API (without /v1); its key is the option `api_key`."""
        return self._cluster.server.url

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes."""
        self._end()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapter | Sequence[Adapter] = None,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in order. `sampling_params` and `lora_request`: one for
        all prompts, or one per prompt.

        Raises:
            InvalidRequest: the model does not accept a prompt or parameter; all prompts are
                cancelled.
            PdserveError: the cluster failed.
        """
        given = [_prompt(each) for each in _listed(prompts)]
        return self._all(given, sampling_params, lora_request, self._complete, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapter | Sequence[Adapter] = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them. `template`: fields of chat
        bodies that control the chat template, such as `continue_final_message`."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        given = [{**template, "messages": each} for each in ([messages] if single else messages)]
        return self._all(given, sampling_params, lora_request, self._converse, use_tqdm)

    def _all(
        self,
        given: Sequence[T],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: Adapter | Sequence[Adapter],
        answer: Callable[[T, SamplingParams, LoRARequest | None], Answering],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(given)
        else:
            params = list(sampling_params)
        if len(params) != len(given):
            raise InvalidRequest(f"{len(given)} prompts have {len(params)} sampling_params")
        adapters = listed(lora_request, len(given))
        if not self._end.alive:
            raise PdserveError("this LLM is closed", code="CLOSED")
        most = max((each.n or 1 for each in params if isinstance(each.n, int)), default=1)
        with tqdm(total=len(given), desc="Processed prompts", disable=not use_tqdm) as bar:
            progress = _Progress(bar)
            limit = asyncio.Semaphore(max(1, self._places // max(1, most)))

            async def one(number: int) -> RequestOutput:
                async with limit:
                    try:
                        output = await answer(given[number], params[number], adapters[number])
                    except PdserveError as error:
                        if len(given) > 1:
                            error.message = f"prompt {number}: {error.message}"
                        raise
                progress.add(output)
                return output

            async def all_of_them() -> list[RequestOutput]:
                async with self._adapters.using(self._cluster.server, adapters):
                    return await _in_order(one, len(given))

            return self._cluster.run(all_of_them())

    async def _complete(
        self, prompt: str | list[int], params: SamplingParams, adapter: LoRARequest | None
    ) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        return await self._ask(prompt, params, adapter, text)

    async def _converse(
        self, body: Mapping[str, Any], params: SamplingParams, adapter: LoRARequest | None
    ) -> RequestOutput:
        """Answers a conversation; the output's prompt is the text of the chat template."""
        server = self._cluster.server
        token_ids = (await server.post("/tokenize", body, tries=TRIES))["tokens"]
        text = (await server.post("/detokenize", {"tokens": token_ids}, tries=TRIES))["prompt"]
        return await self._ask(token_ids, params, adapter, text)

    async def _ask(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        adapter: LoRARequest | None,
        text: str | None,
    ) -> RequestOutput:
        body = {**params.body(), "prompt": prompt}
        if adapter is not None:
            body["model"] = adapter.lora_name
        answer = await self._cluster.server.post(
            "/v1/completions", body, tries=TRIES, headers=TIMELINE
        )
        return read_output(answer, text, params.logprobs)


class _Progress:
    """The progress bar with input and output tokens per second."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._input = self._output = 0

    def add(self, output: RequestOutput) -> None:
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(each.token_ids) for each in output.outputs)
        seconds = self._bar.format_dict["elapsed"] or 1e-9
        rates = f"{self._input / seconds:.0f} toks/s, output: {self._output / seconds:.0f} toks/s"
        self._bar.set_postfix_str(f"input: {rates}", refresh=False)
        self._bar.update(1)


def places(config: ClusterConfig) -> int:
    """Returns how many requests to send at once: twice what the decode steps hold."""
    engine, nodes = config.engine, config.nodes
    steps = (nodes["decode"] + nodes["both"]) * engine.parallel.data_parallel_size
    wanted = 2 * steps * engine.scheduler.seqs
    return min(wanted, config.routing.max_concurrent_requests)


async def _in_order(one: Callable[[int], Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Returns all results in order; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(count)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns a list of prompts; a single prompt may be a string, a mapping or a list of ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    single = len(prompts) > 0 and isinstance(prompts[0], Integral)  # numpy's, too
    return [prompts] if single else prompts  # type: ignore[list-item, return-value]


def _prompt(given: Prompt) -> str | list[int]:
    if isinstance(given, Mapping):
        if len(given) != 1 or not given.keys() <= {"prompt", "prompt_token_ids"}:
            keys = ", ".join(map(str, given))
            raise InvalidRequest(f"a prompt has either prompt or prompt_token_ids, not: {keys}")
        (given,) = given.values()
    if isinstance(given, str):
        return given
    try:
        return [index(each) for each in given]  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequest(f"a prompt is text or token ids: {error}", param="prompt") from error
