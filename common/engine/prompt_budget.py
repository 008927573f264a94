"""How prompts share what a step's decodes leave. Policy only: plain numbers."""

from __future__ import annotations


def share_budget(left: list[int], budget: int, turn: int = 0) -> list[int]:
    """How many of `budget` tokens each prompt gets. `left` are the tokens that each still needs,
    the prompt that was admitted first comes first; `turn` counts steps.

    The oldest one gets half at least, so that nobody starves it; the other half goes to those
    that need less than it, the shortest first, so that they need not wait for its end. What these
    leave goes to all in order of age. Everybody becomes the oldest one day: a prompt is computed
    after at most twice the steps it would take if all older ones came before it. Prompts of one
    length are computed one after the other, which serves them better than all at once.
    """
    shares = [0] * len(left)
    if not left:
        return shares
    shorter = sorted((n, i) for i, n in enumerate(left) if n < left[0])
    # Of an odd budget, and be it of one token, the odd one goes to either in turn.
    half = (budget + turn % 2) // 2 if shorter else budget
    shares[0] = min(left[0], half)
    budget -= shares[0]
    for index in (*(i for _, i in shorter), *range(len(left))):
        more = min(left[index] - shares[index], budget)
        shares[index] += more
        budget -= more
    return shares
