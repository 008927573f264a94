"""Compiles constraints before their requests reach a node, in processes of their own.

    router ── StructuredOutput ──▶ preprocess worker ── fork ──▶ compiles it, ends
           ◀── grammar, or an error ──

A constraint of a few kilobytes may take minutes and gigabytes to compile, or overflow the stack of
its compiler. A child process compiles it within bounds that are several times an honest one's need;
nodes compile only the constraints that passed here, within the same bounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from time import process_time
from weakref import WeakValueDictionary

import msgspec

from pdserve.common.core.apart import Bounds, run_apart
from pdserve.common.core.errors import InvalidRequest, is_defect
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.common.text.grammar import GrammarError, GrammarTokens, check_grammar, to_grammar
from pdserve.router.cluster.served_model import ServedModel

# Nodes rely on these bounds: they compile the constraint again.
BOUNDS = Bounds(cpu_seconds=0.5, memory=512 * 2**20)
logger = logging.getLogger(__name__)

MAX_KNOWN = 64  # remembered outcomes, each of some 100 KiB at most

_ANY_OBJECT = '{"type":"object"}'

Turn = tuple[StructuredOutput, str]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome for one constraint."""

    grammar: str = ""
    error: str = ""  # if not empty, there is no grammar
    seconds: float = 0.0  # of CPU


_replies = msgspec.msgpack.Decoder(Compiled)


class GrammarCompiler:
    """Compiles each constraint once and remembers the outcome."""

    def __init__(
        self,
        compile: Callable[[StructuredOutput, str], Awaitable[Compiled]],
        observe: Callable[[float], None],
    ) -> None:
        """`compile` compiles a constraint for a client; `observe` gets the seconds it took."""
        self._compile = compile
        self._observe = observe
        self._known: OrderedDict[StructuredOutput, Compiled] = OrderedDict()
        # Locks by constraint and client: a client waits for its own compilation, but not for that
        # of another client, whose turn may come late.
        self._turns: WeakValueDictionary[Turn, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, structured: StructuredOutput, client: str) -> str:
        """Returns the grammar that nodes take.

        Raises:
            InvalidRequest: the constraint has no grammar; `param` names the client's field.
            PdserveError: no process could compile it.
        """
        turn = self._turns.setdefault((structured, client), asyncio.Lock())
        async with turn:
            compiled = self._known.get(structured) or await self._ask(structured, client)
            self._known[structured] = compiled
        self._known.move_to_end(structured)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if compiled.error:
            raise InvalidRequest(compiled.error, param=structured.param)
        return compiled.grammar

    async def _ask(self, structured: StructuredOutput, client: str) -> Compiled:
        is_any_object = structured.kind is ConstraintKind.JSON and structured.text == _ANY_OBJECT
        if is_any_object and structured.whitespace_pattern is None:
            return Compiled(to_grammar(structured))  # needs no bounds
        compiled = await self._compile(structured, client)
        self._observe(compiled.seconds)
        return compiled


# ---- where it is compiled --------------------------------------------------------------------


def compile_here(structured: StructuredOutput, model: ServedModel) -> Compiled:
    """Compiles in this process, without bounds of time or memory."""
    start = process_time()
    try:
        tokens = _tokens(model)
        start = process_time()
        grammar = to_grammar(structured)
        check_grammar(structured, grammar, tokens)
        return Compiled(grammar, seconds=process_time() - start)
    except InvalidRequest as error:
        return Compiled(error=error.message, seconds=process_time() - start)
    except GrammarError as error:
        return Compiled(error=f"{structured.param} is not supported: {error}")
    except BaseException as error:  # the library's panics are no Exceptions
        if not is_defect(error) or isinstance(error, MemoryError):
            raise
        logger.error("compiling %s failed", structured.param, exc_info=error)
        return Compiled(error=f"{structured.param} cannot be compiled: {type(error).__name__}")


def compile_apart(structured: StructuredOutput, model: ServedModel) -> Compiled:
    """Compiles in a child of this process, which must have a single thread."""
    with suppress(GrammarError):
        _tokens(model)  # once for all children
    outcome = run_apart(lambda: msgspec.msgpack.encode(compile_here(structured, model)), BOUNDS)
    if outcome.result is not None:
        return _replies.decode(outcome.result)
    return Compiled(
        error=f"{structured.param} cannot be compiled: it takes more than {BOUNDS}",
        seconds=outcome.seconds,
    )


@lru_cache(maxsize=1)
def _tokens(model: ServedModel) -> GrammarTokens:
    tokenizer = model.tokenizer
    return GrammarTokens(tokenizer.to_json(), model.vocab_size, tokenizer.eos_token_ids)
