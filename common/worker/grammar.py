"""Which tokens a sequence's grammar lets come next, on the rank that draws them.

sequence begins ─▶ compiled on a thread ─▶ matcher ─┬─ each step: advance, mask ─▶ sampler
                    (or copied, if known)           └─ gone too far: compiled anew

Whatever output there is then, of before a preemption or of another node, is replayed in pieces.
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

MAX_COMPILED = 32  # grammars that are kept
ALLOWANCE = 0.25  # seconds of CPU that a sequence's masks may take,
ALLOWANCE_PER_TOKEN = 0.001  # and for each token more
RENEWAL = 0.1  # seconds that compiling anew counts for
REPLAY = 0.005  # seconds of CPU after which the rest of an output waits for the next step
PIECE = 16  # tokens of it

Mask = NDArray[np.int32]  # a bit for each token


class Grammars:
    """Compiled grammars of a rank. Those used last are kept: a sequence begins with a copy."""

    def __init__(self, load: Callable[[], GrammarTokens]) -> None:
        """`load` is called once, with the first grammar, on the thread that compiles."""
        self._load = load
        self._tokens: GrammarTokens | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[str, Future[AnswerMatcher]] = OrderedDict()
        self._waiting: Counter[Future[AnswerMatcher]] = Counter()  # sequences

    def begin(self, grammar: str) -> RowGrammar:
        """For a sequence without output."""
        return RowGrammar(self, grammar)

    def get(self, grammar: str) -> Future[AnswerMatcher]:
        """At the beginning of a text; to be copied. Whoever gets it calls `leave` once."""
        known = self._compiled.get(grammar)
        if known is None or (known.done() and known.exception() is not None):
            known = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        self._waiting[known] += 1
        return known

    def renew(self, grammar: str) -> Future[AnswerMatcher]:
        """One that shares nothing with others of this grammar; nor will later ones share what has
        gone too far."""
        self._compiled.pop(grammar, None)
        renewed = self._thread.submit(self._compile, grammar)
        self._waiting[renewed] += 1
        return renewed

    def leave(self, grammar: str, compiling: Future[AnswerMatcher]) -> None:
        """A sequence has it, or waits for it no more. What nobody waits for is not begun: others
        do."""
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
    """One sequence's: its output so far, and the mask of what comes next."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._compiling: Future[AnswerMatcher] | None = grammars.get(grammar)
        self._matcher: AnswerMatcher | None = None
        self._output: list[int] = []
        self._num_matched = 0
        self._fresh = False  # compiled for this text alone, and no mask given yet
        self.seconds = 0.0  # of CPU, that its masks took, but for what was replayed,
        self.last_seconds = 0.0  # and the last call with all

    def advance(self, token_ids: Sequence[int]) -> None:
        """More tokens of the output."""
        self._output += token_ids

    @property
    def waits_for(self) -> Future[AnswerMatcher] | None:
        """None: `mask` has an answer, or goes on with a replay."""
        return self._compiling

    @property
    def complete(self) -> bool:
        """Nothing but an end token may come. Known once there is a mask."""
        return self._matcher is not None and self._matcher.complete

    def close(self) -> None:
        """It waits for nothing any more."""
        if self._compiling is not None:
            self._grammars.leave(self._grammar, self._compiling)
            self._compiling = None

    def mask(self) -> Mask | None:
        """Of the next position; None: not yet.

        Raises:
            GrammarError: there will be none.
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
        # Perhaps others have used up what they share with it: alone it may be well.
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
