"""Which tokens a sequence's grammar lets come next, on the rank that draws them.

sequence begins ─▶ compiled on a thread ─▶ Matcher ─┬─ each step: advance, mask ─▶ sampler
                    (or copied, if known)           └─ gone too far: compiled anew, replayed
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from pdserve.common.text.grammar import GrammarError, GrammarTokens, Matcher

MAX_COMPILED = 32  # grammars that are kept
ALLOWANCE = 0.25  # seconds of CPU that a sequence's masks may take,
ALLOWANCE_PER_TOKEN = 0.001  # and for each token more
RENEWAL = 0.1  # seconds that compiling anew counts for

Mask = NDArray[np.int32]  # a bit for each token


class Grammars:
    """Compiled grammars of a rank. Those used last are kept: a sequence begins with a copy."""

    def __init__(self, load: Callable[[], GrammarTokens]) -> None:
        """`load` is called once, with the first grammar, on the thread that compiles."""
        self._load = load
        self._tokens: GrammarTokens | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()

    def begin(self, grammar: str) -> RowGrammar:
        """For a sequence without output."""
        return RowGrammar(self, grammar)

    def get(self, grammar: str) -> Future[Matcher]:
        """At the beginning of a text; to be copied."""
        known = self._compiled.get(grammar)
        if known is None or (known.done() and known.exception() is not None):
            known = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known

    def renew(self, grammar: str, token_ids: Sequence[int]) -> Future[Matcher]:
        """After these tokens, sharing nothing with others of this grammar; nor will later ones
        share what has gone too far."""
        self._compiled.pop(grammar, None)
        return self._thread.submit(self._compile, grammar, tuple(token_ids))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, token_ids: Sequence[int] = ()) -> Matcher:
        if self._tokens is None:
            self._tokens = self._load()
        matcher = Matcher.compile(self._tokens, grammar)
        matcher.advance(token_ids)
        return matcher


class RowGrammar:
    """One sequence's: its output so far, and the mask of what comes next."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._compiling: Future[Matcher] | None = grammars.get(grammar)
        self._matcher: Matcher | None = None
        self._output: list[int] = []
        self._num_matched = 0
        self._fresh = False  # compiled for this text alone, and no mask given yet
        self.seconds = 0.0  # of CPU, that its masks took,
        self.last_seconds = 0.0  # and the last of them

    def advance(self, token_ids: Sequence[int]) -> None:
        """More tokens of the output."""
        self._output += token_ids

    @property
    def waits_for(self) -> Future[Matcher] | None:
        """None: `mask` has an answer now."""
        return self._compiling

    @property
    def complete(self) -> bool:
        """Nothing but an end token may come. Known once there is a mask."""
        return self._matcher is not None and self._matcher.complete

    def mask(self) -> Mask | None:
        """Of the next position; None: not yet.

        Raises:
            GrammarError: there will be none.
        """
        if self._compiling is not None:
            if not self._compiling.done():
                return None
            matcher, self._compiling = self._compiling.result(), None
            self._matcher = matcher if self._fresh else matcher.copy()
        if self.seconds > ALLOWANCE + ALLOWANCE_PER_TOKEN * len(self._output):
            raise GrammarError(f"its masks took {self.seconds:.2f} s: it is too complex")
        start = thread_time()
        try:
            return self._next_mask()
        except GrammarError:
            if self._fresh:
                raise
        finally:
            self.last_seconds = thread_time() - start
            self.seconds += self.last_seconds
        # Perhaps others have used up what they share with it: alone it may be well.
        self._compiling = self._grammars.renew(self._grammar, self._output)
        self._num_matched, self._fresh = len(self._output), True
        self.seconds += RENEWAL
        return None

    def _next_mask(self) -> Mask:
        assert self._matcher is not None
        self._matcher.advance(self._output[self._num_matched :])
        self._num_matched = len(self._output)
        mask = self._matcher.mask()
        self._fresh = False
        return np.frombuffer(mask, dtype=np.int32)
