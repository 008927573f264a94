"""Log-probabilities of prompt tokens as packed arrays, since there may be a million of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import MAX_LOGPROBS
from pdserve.common.core.sampling import SampledToken, TokenLogprobs

# Entries (a token and each of its most likely alternatives) per request: about 80 bytes each as
# JSON, 8 bytes between nodes, which keeps messages far below gRPC's limit.
MAX_ENTRIES = 2**19


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities (natural log, of the model's own distribution) of N = `len()` prompt tokens
    from position `start` on. The first token of a prompt has none. Arrays are 32-bit, in the
    machine's byte order, which is little-endian on all supported machines."""

    start: int
    num_top: int
    logprobs: bytes  # float [N]
    ranks: bytes  # unsigned [N]: 1 is the most likely token
    top_token_ids: bytes  # unsigned [N, num_top], most likely first
    top_logprobs: bytes  # float [N, num_top]

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def check(self, start: int, count: int, num_top: int, vocab_size: int) -> None:
        """Raises ValueError unless it has `count` tokens from `start`, `num_top` alternatives each,
        and only token ids below `vocab_size`."""
        sizes = [len(self.logprobs), len(self.ranks)]
        tops = [len(self.top_token_ids), len(self.top_logprobs)]
        if (self.start, self.num_top) != (start, num_top) or sizes + tops != [
            *(4 * count,) * 2,
            *(4 * count * num_top,) * 2,
        ]:
            raise ValueError(f"there are not {num_top} alternatives for each of {count} tokens")
        if max(memoryview(self.top_token_ids).cast("I"), default=0) >= vocab_size:
            raise ValueError("a token is outside the vocabulary")

    def split(self, size: int) -> Iterator[PromptLogprobs]:
        """Yields parts of at most `size` tokens."""
        wide = 4 * self.num_top
        for first in range(0, len(self), size):
            rows = slice(4 * first, 4 * (first + size))
            cells = slice(wide * first, wide * (first + size))
            yield PromptLogprobs(
                self.start + first,
                self.num_top,
                self.logprobs[rows],
                self.ranks[rows],
                self.top_token_ids[cells],
                self.top_logprobs[cells],
            )

    def tokens(
        self, token_ids: Sequence[int], num_top: int = MAX_LOGPROBS
    ) -> Iterator[SampledToken]:
        """Yields the prompt's tokens, `token_ids`, in the form of sampled ones."""
        for token_id, (logprob, _, top) in zip(token_ids, self.rows(num_top), strict=True):
            yield SampledToken(token_id, TokenLogprobs(logprob, tuple(top)))

    def rows(self, num_top: int) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Yields (log-probability, rank, alternatives) per token; alternatives are at most
        `num_top` (token id, log-probability), most likely first."""
        ids = memoryview(self.top_token_ids).cast("I").tolist()
        values = memoryview(self.top_logprobs).cast("f").tolist()
        own = memoryview(self.logprobs).cast("f").tolist()
        ranks = memoryview(self.ranks).cast("I").tolist()
        wanted = min(num_top, self.num_top)
        for row, (logprob, rank) in enumerate(zip(own, ranks, strict=True)):
            first = row * self.num_top
            top = slice(first, first + wanted)
            yield logprob, rank, list(zip(ids[top], values[top], strict=True))


def join(parts: Sequence[PromptLogprobs], num_top: int) -> PromptLogprobs:
    """Joins consecutive parts; without parts, returns the empty one of a one-token prompt."""
    return PromptLogprobs(
        start=parts[0].start if parts else 1,
        num_top=num_top,
        logprobs=b"".join([each.logprobs for each in parts]),
        ranks=b"".join([each.ranks for each in parts]),
        top_token_ids=b"".join([each.top_token_ids for each in parts]),
        top_logprobs=b"".join([each.top_logprobs for each in parts]),
    )


def check_size(num_tokens: int, num_top: int) -> None:
    """Raises InvalidRequest if `num_tokens` tokens with `num_top` alternatives exceed
    MAX_ENTRIES."""
    if num_tokens * (1 + num_top) > MAX_ENTRIES:
        raise InvalidRequest(
            f"log-probabilities of {num_tokens} prompt tokens, each with {num_top} alternatives, "
            f"exceed {MAX_ENTRIES}: ask for fewer alternatives, or for fewer or shorter prompts",
            param="prompt_logprobs",
        )
