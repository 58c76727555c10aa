"""Published losses, written as loops over the tokens of a batch in plain lists.

Every loss is a function of the policy's log-probabilities `now`, as lists of sequences, and of
`held`, the same ones where a formula stops the gradient.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshrl.common.job.config import AlgorithmConfig, JobConfig, RolloutConfig
from meshrl.common.job.constraints import AlgorithmName
from meshrl.services.trainer.learner.aggregation import get_aggregation
from meshrl.services.trainer.learner.objective import compute_objective
from meshrl.services.trainer.losses.terms import LossTerms

LONGEST = 40  # rollout.max_tokens

Lists = list[list[float]]  # one number per token, by sequence
Term = Callable[[int, int], float]  # of a token, by its sequence and position


@dataclass(slots=True)
class Tokens:
    """Sequences of the model's own tokens: lists of lists."""

    now: list[list[float]]
    behaviour: list[list[float]]
    proximal: list[list[float]]
    reference: list[list[float]]
    teacher: list[list[float]]
    advantage: list[list[float]]

    @property
    def count(self) -> int:
        return sum(len(one) for one in self.now)


# A loss by `now`, `held` and the tokens.
Loss = Callable[[Lists, Lists, Tokens], float]


def batch(seed: int, spread: float = 0.3, count: int = 5, of_tokens: bool = False) -> Tokens:
    """Return sequences of 1 to 9 tokens; other policies differ by normal deviates of size
    `spread`.
    """
    draw = random.Random(seed)
    lengths = [draw.randint(1, 9) for _ in range(count)]

    def policy(around: Lists, size: float) -> Lists:
        return [[x + draw.gauss(0, size) for x in one] for one in around]

    now = [[draw.uniform(-4, -0.1) for _ in range(n)] for n in lengths]
    worth = [draw.gauss(0, 1) for _ in lengths]
    return Tokens(
        now=now,
        behaviour=policy(now, spread),
        proximal=policy(now, spread),
        reference=policy(now, 0.5),
        teacher=policy(now, 0.5),
        advantage=[
            [draw.gauss(0, 1) if of_tokens else one for _ in range(n)]
            for one, n in zip(worth, lengths, strict=True)
        ],
    )


def flat(lists: Lists) -> torch.Tensor:
    return torch.tensor([x for one in lists for x in one], dtype=torch.float64)


def terms(tokens: Tokens) -> LossTerms:
    """Return the same batch as the terms of one bin."""
    sequence = [i for i, one in enumerate(tokens.now) for _ in one]
    return LossTerms(
        logprobs=flat(tokens.now),
        behaviour_logprobs=flat(tokens.behaviour),
        proximal_logprobs=flat(tokens.proximal),
        advantages=flat(tokens.advantage),
        sequence_ids=torch.tensor(sequence),
        sequence_count=len(tokens.now),
        extras={"reference": flat(tokens.reference), "teacher": flat(tokens.teacher)},
    )


def job(name: AlgorithmName, **keys: Any) -> JobConfig:
    """Return a job of this algorithm."""
    return JobConfig(
        rollout=RolloutConfig(max_tokens=LONGEST), algorithm=AlgorithmConfig(name=name, **keys)
    )


def weights(tokens: Tokens, config: JobConfig) -> torch.Tensor:
    """Compute [t] of a bin by the documented aggregation."""
    kind = get_aggregation(config)
    constant = config.algorithm.loss_constant or LONGEST
    each: dict[str, Callable[[int], float]] = {
        "tokens": lambda n: 1.0,
        "sequences": lambda n: 1 / n,
        "constant": lambda n: 1 / constant,
    }
    return flat([[each[kind](len(one))] * len(one) for one in tokens.now])


def ours(tokens: Tokens, config: JobConfig) -> tuple[float, torch.Tensor]:
    """Return (loss, slope [t]) of a step with this batch alone."""
    found = compute_objective(terms(tokens), weights(tokens, config), config.algorithm)
    by_tokens = get_aggregation(config) == "tokens"
    denominator = tokens.count if by_tokens else len(tokens.now)
    return float(found.losses.sum()) / denominator, found.logprob_gradient / denominator


def slope(loss: Loss, tokens: Tokens, step: float = 1e-6) -> torch.Tensor:
    """Compute the slope by central differences of a plain loss with respect to each of `now`."""
    found = []
    for i, one in enumerate(tokens.now):
        for t in range(len(one)):
            ends = []
            for sign in (1, -1):
                moved = [list(other) for other in tokens.now]
                moved[i][t] += sign * step
                ends.append(loss(moved, tokens.now, tokens))
            found.append((ends[0] - ends[1]) / (2 * step))
    return torch.tensor(found, dtype=torch.float64)


def is_close(found: torch.Tensor, differences: torch.Tensor) -> bool:
    """Return whether a slope agrees with differences, which are exact to rounding of the loss."""
    largest = max(1.0, float(differences.abs().max()))
    return torch.allclose(found, differences, rtol=1e-6, atol=2e-9 * largest)


# -- pieces of formulas ----------------------------------------------------------------------------


def every(tokens: Tokens) -> list[tuple[int, int]]:
    """Yield (sequence, place) of each token."""
    return [(i, t) for i, one in enumerate(tokens.now) for t in range(len(one))]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float = 0.0) -> float:
    value = -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    return min(value, -dual * advantage) if dual and advantage < 0 else value


def mean_over_tokens(term: Term, tokens: Tokens) -> float:
    return sum(term(i, t) for i, t in every(tokens)) / tokens.count


def mean_of_means(term: Term, tokens: Tokens) -> float:
    rows = [[term(i, t) for t in range(len(one))] for i, one in enumerate(tokens.now)]
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def mean_of_sums(term: Term, tokens: Tokens, constant: int = LONGEST) -> float:
    return sum(term(i, t) for i, t in every(tokens)) / constant / len(tokens.now)


def surrogate(now: Lists, tokens: Tokens, low: float, high: float, dual: float = 0.0) -> Term:
    def term(i: int, t: int) -> float:
        ratio = math.exp(now[i][t] - tokens.behaviour[i][t])
        return clipped(ratio, tokens.advantage[i][t], low, high, dual)

    return term


# -- published losses ------------------------------------------------------------------------------


def grpo(now: Lists, held: Lists, tokens: Tokens) -> float:
    return mean_over_tokens(surrogate(now, tokens, 0.2, 0.28, 3.0), tokens)


def grpo_published(now: Lists, held: Lists, tokens: Tokens) -> float:
    """Compute the loss of Shao et al. 2024, equation 3, with the KL estimate of its equation 4."""

    def term(i: int, t: int) -> float:
        log_ratio = tokens.reference[i][t] - now[i][t]
        return surrogate(now, tokens, 0.2, 0.2)(i, t) + 0.04 * (math.exp(log_ratio) - log_ratio - 1)

    return mean_of_means(term, tokens)


def dr_grpo(now: Lists, held: Lists, tokens: Tokens) -> float:
    return mean_of_sums(surrogate(now, tokens, 0.2, 0.2), tokens)


def dapo(now: Lists, held: Lists, tokens: Tokens) -> float:
    return mean_over_tokens(surrogate(now, tokens, 0.2, 0.28), tokens)


def rloo(now: Lists, held: Lists, tokens: Tokens) -> float:
    return mean_of_sums(surrogate(now, tokens, 0.2, 0.2), tokens)


def reinforce_pp(now: Lists, held: Lists, tokens: Tokens) -> float:
    return mean_over_tokens(surrogate(now, tokens, 0.2, 0.2), tokens)


ppo = reinforce_pp


def gspo(now: Lists, held: Lists, tokens: Tokens) -> float:
    total = 0.0
    for i, one in enumerate(now):
        log_ratio = sum(one[t] - tokens.behaviour[i][t] for t in range(len(one))) / len(one)
        total += clipped(math.exp(log_ratio), tokens.advantage[i][0], 3e-4, 4e-4)
    return total / len(now)


def cispo(now: Lists, held: Lists, tokens: Tokens) -> float:
    def term(i: int, t: int) -> float:
        ratio = clip(math.exp(held[i][t] - tokens.behaviour[i][t]), 0.0, 1.28)
        return -ratio * tokens.advantage[i][t] * now[i][t]

    return mean_over_tokens(term, tokens)


def sft(now: Lists, held: Lists, tokens: Tokens) -> float:
    return mean_over_tokens(lambda i, t: -now[i][t], tokens)


def distill(now: Lists, held: Lists, tokens: Tokens) -> float:
    def term(i: int, t: int) -> float:
        ratio = math.exp(now[i][t] - tokens.behaviour[i][t])
        return clipped(ratio, tokens.teacher[i][t] - held[i][t], 0.2, 0.28, 3.0)

    return mean_over_tokens(term, tokens)
