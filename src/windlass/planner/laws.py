"""Expected loss of N parameters on D tokens by two published scaling laws, with a discount for repeated data."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingLaw:
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


HOFFMANN = ScalingLaw(
    name="Hoffmann 2022",
    e=1.69,
    a=406.4,
    b=410.7,
    alpha=0.34,
    beta=0.28,
    source="Hoffmann et al. 2022, arXiv 2203.15556, approach 3, as printed (rounded)",
)
BESIROGLU = ScalingLaw(
    name="Besiroglu 2024",
    e=1.8172,
    a=482.01,
    b=2085.43,
    alpha=0.3478,
    beta=0.3658,
    source="Besiroglu et al. 2024, arXiv 2404.10102: the same data fitted again",
)
LAWS = (HOFFMANN, BESIROGLU)
# Standard error of E in the second fit: no prediction by these laws is more certain.
MIN_ERROR = 0.03
FITTED_PARAMETERS = (44e6, 16.2e9)
# Range of Hoffmann's experiments; outside it the law is extrapolated.
FITTED_TOKENS = (0.3e9, 500e9)
# R* of Muennighoff et al. 2023 (arXiv 2305.16264): after this many repeated passes a further one is worth 1/e.
REPEAT_HALF_LIFE = 15.39

CAVEATS = (
    "the expected loss is in nats per token on English web text (MassiveText) with its 32k tokenizer; another language, mix or tokenizer shifts it",
    "use it to compare model sizes, not with your own loss curve: for that, rely on bits per byte on your validation set",
    "it was fitted to models of 0.04B to 16B parameters and up to about 0.5T tokens; values with * are extrapolated",
    "it says nothing about downstream tasks, and assumes a tuned learning rate and a schedule that ends with the run",
)


@dataclass(frozen=True)
class ExpectedLoss:
    """Expected loss in nats per token, with its range."""

    by_law: dict[str, float]
    low: float
    high: float
    extrapolated: bool
    # Number of fresh tokens that would be worth as much.
    effective_tokens: float


def expected_loss(parameters: float, tokens: float, unique: float | None = None) -> ExpectedLoss:
    """Both laws; the range spans them and their error. `unique`: tokens before data repeats."""
    worth = effective_tokens(tokens, unique)
    by_law = {law.name: law.loss(parameters, worth) for law in LAWS}
    (fewest, most), (shortest, longest) = FITTED_PARAMETERS, FITTED_TOKENS
    return ExpectedLoss(
        by_law=by_law,
        low=min(by_law.values()) - MIN_ERROR,
        high=max(by_law.values()) + MIN_ERROR,
        extrapolated=not (fewest <= parameters <= most and shortest <= tokens <= longest),
        effective_tokens=worth,
    )


def effective_tokens(tokens: float, unique: float | None) -> float:
    """Fresh tokens of the same value: U + U R* (1 - exp(-R / R*)) with R repeated passes over U."""
    if unique is None or tokens <= unique:
        return tokens
    passes = tokens / unique - 1
    return unique + unique * REPEAT_HALF_LIFE * (1 - math.exp(-passes / REPEAT_HALF_LIFE))
