"""Computes which tokens a sequence's grammar allows next, on the rank that samples.

sequence begins ─▶ compiled on a thread ─▶ matcher ─┬─ each step: advance, mask ─▶ sampler
                    (or copied from cache)          └─ limit of shared state hit: compiled again

Output from before a preemption or from another node is replayed in pieces.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from pdserve.common.text.grammar import GrammarError, GrammarTokens
from pdserve.common.text.opening import AnswerMatcher

MAX_COMPILED = 32  # compiled grammars that are kept
ALLOWANCE = 0.25  # seconds of CPU for a sequence's masks
ALLOWANCE_PER_TOKEN = 0.001  # plus this much per output token
RENEWAL = 0.1  # seconds that a recompilation counts as
REPLAY = 0.005  # seconds of CPU for replay per step
PIECE = 16  # tokens replayed at once

Mask = NDArray[np.int32]  # one bit per token


class Grammars:
    """The LRU cache of a rank's compiled grammars; each sequence works on a copy."""

    def __init__(self, load: Callable[[], GrammarTokens]) -> None:
        """`load` is called once, for the first grammar, on the compiling thread."""
        self._load = load
        self._tokens: GrammarTokens | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[str, Future[AnswerMatcher]] = OrderedDict()
        self._waiting: Counter[Future[AnswerMatcher]] = Counter()  # sequences per future

    def begin(self, grammar: str) -> RowGrammar:
        """Returns the grammar state of a new sequence without output."""
        return RowGrammar(self, grammar)

    def get(self, grammar: str) -> Future[AnswerMatcher]:
        """Returns a matcher at the beginning of a text, which the caller copies. The caller must
        call `leave` once."""
        known = self._compiled.get(grammar)
        if known is None or (known.done() and known.exception() is not None):
            known = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        self._waiting[known] += 1
        return known

    def renew(self, grammar: str) -> Future[AnswerMatcher]:
        """Compiles the grammar again, without shared state, and drops the cached one, whose state
        has hit its limit."""
        self._compiled.pop(grammar, None)
        renewed = self._thread.submit(self._compile, grammar)
        self._waiting[renewed] += 1
        return renewed

    def leave(self, grammar: str, compiling: Future[AnswerMatcher]) -> None:
        """Ends a sequence's wait; cancels a compilation that no sequence waits for."""
        self._waiting[compiling] -= 1
        if self._waiting[compiling] > 0:
            return
        del self._waiting[compiling]
        if compiling.cancel() and self._compiled.get(grammar) is compiling:
            del self._compiled[grammar]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> AnswerMatcher:
        if self._tokens is None:
            self._tokens = self._load()
        return AnswerMatcher.compile(self._tokens, grammar)


class RowGrammar:
    """The grammar state of one sequence: its output so far and the mask of the next token."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._compiling: Future[AnswerMatcher] | None = grammars.get(grammar)
        self._matcher: AnswerMatcher | None = None
        self._output: list[int] = []
        self._num_matched = 0
        self._fresh = False  # compiled for this sequence alone, and no mask computed yet
        self.seconds = 0.0  # CPU time of its masks, without replays
        self.last_seconds = 0.0  # CPU time of the last call, with replay

    def advance(self, token_ids: Sequence[int]) -> None:
        """Adds tokens of the output."""
        self._output += token_ids

    @property
    def waits_for(self) -> Future[AnswerMatcher] | None:
        """The compilation that `mask` waits for; None if it can compute now."""
        return self._compiling

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow; valid after the first mask."""
        return self._matcher is not None and self._matcher.complete

    def close(self) -> None:
        """Ends a wait for a compilation."""
        if self._compiling is not None:
            self._grammars.leave(self._grammar, self._compiling)
            self._compiling = None

    def mask(self) -> Mask | None:
        """Returns the mask of the next position, None if it is not ready.

        Raises:
            GrammarError: the grammar failed or used up its CPU time.
        """
        if self._compiling is not None:
            if not self._compiling.done():
                return None
            compiled = self._compiling
            self.close()
            matcher = compiled.result()
            self._matcher = matcher if self._fresh else matcher.copy()
        if self.seconds > ALLOWANCE + ALLOWANCE_PER_TOKEN * len(self._output):
            raise GrammarError(f"its masks took {self.seconds:.2f} s: it is too complex")
        replayed = len(self._output) > self._num_matched + 1
        start = thread_time()
        try:
            return self._next_mask(until=start + REPLAY)
        except GrammarError:
            if self._fresh:
                raise
        finally:
            self.last_seconds = thread_time() - start
            self.seconds += 0 if replayed else self.last_seconds
        # Other sequences may have used up the shared state's limit: try without sharing.
        self._compiling = self._grammars.renew(self._grammar)
        self._num_matched, self._fresh = 0, True
        self.seconds += RENEWAL
        return None

    def _next_mask(self, until: float) -> Mask | None:
        assert self._matcher is not None
        while piece := self._output[self._num_matched : self._num_matched + PIECE]:
            if thread_time() > until:
                return None
            self._matcher.advance(piece)
            self._num_matched += len(piece)
        mask = self._matcher.mask()
        self._fresh = False
        return np.frombuffer(mask, dtype=np.int32)
