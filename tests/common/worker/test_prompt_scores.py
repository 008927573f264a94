"""Log-probabilities and ranks of prompt tokens, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pdserve.common.worker import prompt_scores
from pdserve.common.worker.input_batch import StepSequence
from pdserve.common.worker.prompt_scores import score_prompts

# Of four tokens, by row; a row's log-probabilities are these, since they add up to one.
ROWS = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]).log()
TOKENS = (0, 1, 3)
HIDDEN = torch.cat((torch.zeros(2, 4), ROWS))  # two tokens of another sequence come first


def sequence(num_top: int) -> StepSequence:
    return StepSequence(
        seq_id=7, start=4, token_ids=TOKENS, block_tables=(), sampling=None, seed=0,
        scored=TOKENS, num_top=num_top,
    )  # fmt: skip


@pytest.mark.parametrize("rows_at_once", [1, 2, 3])
def test_tokens_have_their_rank_and_log_probability(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    """The most likely token has rank 1; equally likely ones share the last of their ranks."""
    monkeypatch.setattr(prompt_scores, "MAX_LOGITS", rows_at_once * 4)
    sizes: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return hidden

    ((seq_id, scores),) = score_prompts(HIDDEN, [(2, sequence(2))], head, 4, samples=True)
    assert seq_id == 7 and scores.start == 5 and max(sizes) == rows_at_once and sum(sizes) == 3
    own, ranks, tops = zip(*scores.rows(2), strict=True)
    assert own == pytest.approx([math.log(each) for each in (0.5, 0.2, 0.25)])
    assert ranks == (1, 3, 4)
    assert tops[0][0] == (0, pytest.approx(math.log(0.5)))
    assert [token for token, _ in tops[1]] == [3, 2]


def test_a_rank_that_does_not_sample_takes_part_in_the_head_and_scores_nothing() -> None:
    calls: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        calls.append(len(hidden))
        return hidden

    assert score_prompts(HIDDEN, [(2, sequence(2))], head, 4, samples=False) == ()
    assert calls == [3]
