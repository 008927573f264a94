"""Drafts by prompt lookup: finds the last tokens of a sequence earlier in it.

Uses hash chains, as in deflate (RFC 1951, section 4): a table has the last position of each hash of
n tokens, and each position links to the previous one with the same hash. Candidates are compared
token by token, so a collision only costs time. A token costs O(1) time and 8 to 20 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from pdserve.common.config.speculation import Speculation
from pdserve.common.engine.sequence import Sequence
from pdserve.common.engine.speculation import Draft, Speculator

MAX_CANDIDATES = 8  # positions that are compared, the latest first
INDEXED_AT_ONCE = 2048  # tokens per step, since indexing blocks the event loop
_FIRST_SIZE = 1024
_NONE = -1


class PromptLookup(Speculator):
    """Drafts the tokens that followed the last tokens earlier in the sequence. This often works for
    summaries, code and repetition. It runs on the event loop, in microseconds."""

    def __init__(self, config: Speculation, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._indexes: dict[int, NGramIndex] = {}  # by seq_id

    def draft(self, sequence: Sequence, most: int) -> Draft:
        index = self._indexes.get(sequence.seq_id)
        if index is None:
            shortest, longest = self.config.prompt_lookup_min, self.config.prompt_lookup_max
            index = self._indexes[sequence.seq_id] = NGramIndex(shortest, longest)
        index.extend(sequence.token_ids)
        guesses = index.continuation(sequence.token_ids, most)
        return Draft(len(guesses), guesses)

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.seq_id, None)


class NGramIndex:
    """The n-gram index of one sequence, which only grows. A place is the position after an n-gram
    of `shortest` tokens; the last n-gram, which nothing follows yet, is not in the index. When the
    table gets too small, a larger one is filled over several steps."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._reset(_FIRST_SIZE)

    def _reset(self, size: int) -> None:
        """Makes the index empty, with room for at least `size` tokens."""
        slots = 1 << (size - 1).bit_length()
        self._table = array("i", [_NONE]) * slots  # hash → last place
        self._before = array("i", [_NONE]) * self._shortest  # place → previous place

    def extend(self, token_ids: SequenceOf[int]) -> None:
        """Indexes at most `INDEXED_AT_ONCE` of the tokens that are not indexed yet."""
        if len(token_ids) > len(self._table):
            self._reset(2 * len(token_ids))
        start = len(self._before)
        for place in range(start, min(len(token_ids), start + INDEXED_AT_ONCE)):
            slot = self._slot(token_ids, place)
            self._before.append(self._table[slot])
            self._table[slot] = place

    def continuation(self, token_ids: SequenceOf[int], most: int) -> tuple[int, ...]:
        """Returns up to `most` tokens that followed the longest match (`shortest` … `longest`
        tokens) of the last tokens; of equally long matches the latest. A match that reaches the end
        repeats itself."""
        place = self._best(token_ids)
        if place == _NONE:
            return ()
        period = len(token_ids) - place
        return tuple([token_ids[place + i % period] for i in range(most)])

    def _best(self, token_ids: SequenceOf[int]) -> int:
        end, best, length = len(token_ids), _NONE, self._shortest - 1
        if end < self._shortest:
            return _NONE
        place = self._table[self._slot(token_ids, end)]
        for _ in range(MAX_CANDIDATES):
            if place == _NONE or length == self._longest:
                break
            matched = self._matched(token_ids, place, end)
            if matched > length:
                best, length = place, matched
            place = self._before[place]
        return best

    def _matched(self, token_ids: SequenceOf[int], place: int, end: int) -> int:
        """Returns how many tokens before `place` equal those before `end`, at most `longest`."""
        most = min(self._longest, place)
        for count in range(most):
            if token_ids[place - 1 - count] != token_ids[end - 1 - count]:
                return count
        return most

    def _slot(self, token_ids: SequenceOf[int], place: int) -> int:
        gram = token_ids[place - self._shortest : place]
        return hash(tuple(gram)) & (len(self._table) - 1)
