"""What loss may be expected of N parameters and D tokens? Two published fits of one law, the repetition of data, and what they cannot know."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    """L = E + A / N^alpha + B / D^beta, nats per token."""

    name: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        return float(self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def best_parameters(self, flops: float) -> float:
        """The size that reaches the lowest loss with 6ND = flops."""
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        return float(g * (flops / 6) ** (self.beta / (self.alpha + self.beta)))


HOFFMANN = Law(
    "Hoffmann 2022",
    1.69,
    406.4,
    410.7,
    0.34,
    0.28,
    "Hoffmann et al. 2022, arXiv 2203.15556, approach 3, as printed (rounded)",
)
BESIROGLU = Law(
    "Besiroglu 2024",
    1.8172,
    482.01,
    2085.43,
    0.3478,
    0.3658,
    "Besiroglu et al. 2024, arXiv 2404.10102: the same data fitted again",
)
LAWS = (HOFFMANN, BESIROGLU)
LEAST_ERROR = 0.03
"""Standard error of E in the second fit: no prediction by these laws is surer than that."""
FITTED_PARAMETERS = (44e6, 16.2e9)
FITTED_TOKENS = (0.3e9, 500e9)
"""Roughly what Hoffmann's experiments span; beyond, the law is extrapolated."""
REPEAT_HALF_LIFE = 15.39
"""R* of Muennighoff et al. 2023 (arXiv 2305.16264): repeated passes are worth less and less, by this many passes 1/e."""

CAVEATS = (
    "nats per token on English web text (MassiveText) with its 32k tokenizer: another language, mix or tokenizer shifts the level",
    "compare sizes with each other, not with your own loss curve; bits per byte on your validation set is the honest measure",
    "fitted to models of 0.04B to 16B parameters and up to about 0.5T tokens; beyond that it is extrapolation",
    "says nothing of downstream tasks, and assumes a tuned learning rate and a schedule that ends with the run",
)


@dataclass(frozen=True)
class Guess:
    """An expected loss with its range."""

    by_law: dict[str, float]
    low: float
    high: float
    extrapolated: bool
    effective_tokens: float
    """What the tokens are worth when data is repeated."""


def expected_loss(parameters: float, tokens: float, unique: float | None = None) -> Guess:
    """Both laws; the range spans them and the least error. `unique`: tokens before data repeats."""
    worth = effective_tokens(tokens, unique)
    found = {law.name: law.loss(parameters, worth) for law in LAWS}
    inside = (
        FITTED_PARAMETERS[0] <= parameters <= FITTED_PARAMETERS[1] and FITTED_TOKENS[0] <= tokens <= FITTED_TOKENS[1]
    )
    return Guess(found, min(found.values()) - LEAST_ERROR, max(found.values()) + LEAST_ERROR, not inside, worth)


def effective_tokens(tokens: float, unique: float | None) -> float:
    """Tokens of fresh data that would teach as much: U + U R* (1 - exp(-R / R*)) with R further passes over U."""
    if unique is None or tokens <= unique:
        return tokens
    passes = tokens / unique - 1
    return unique + unique * REPEAT_HALF_LIFE * (1 - math.exp(-passes / REPEAT_HALF_LIFE))
