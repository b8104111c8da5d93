"""Rotary positions: angular speeds of the pairs of a head, scaled for sequences longer than the model began with."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How the speeds change so that a model trained on `old_length` positions reads `factor` times as many."""

    kind: str  # linear, llama3 or yarn
    factor: float
    old_length: int = 0
    # llama3: turns over the old length below which a pair is slowed fully, and above which not at all.
    low_turns: float = 1.0
    high_turns: float = 4.0
    # yarn: the same two limits, as the paper names them.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the limits are rounded to pairs
    # yarn: cosines and sines are multiplied by this; None: 0.1 ln(factor) + 1, or what the two mscales give.
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def amplitude(self) -> float:
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Rope:
    theta: float
    dim: int  # numbers of a head that are turned, from its beginning
    scaling: RopeScaling | None = None

    def slowdowns(self) -> list[float]:
        """What the speed of each pair, theta^(-2 pair / dim) radians a position, is multiplied by."""
        scaling = self.scaling
        if scaling is None:
            return [1.0] * (self.dim // 2)
        if scaling.kind == "linear":
            return [1.0 / scaling.factor] * (self.dim // 2)
        kept = self._kept_llama3(scaling) if scaling.kind == "llama3" else self._kept_yarn(scaling)
        return [share + (1.0 - share) / scaling.factor for share in kept]

    def _kept_llama3(self, scaling: RopeScaling) -> list[float]:
        """Share of each pair's speed that is kept, by its turns over the old length."""
        speeds = [self.theta ** -(number / self.dim) for number in range(0, self.dim, 2)]
        turns = [scaling.old_length * speed / (2 * math.pi) for speed in speeds]
        span = scaling.high_turns - scaling.low_turns
        return [min(1.0, max(0.0, (turn - scaling.low_turns) / span)) for turn in turns]

    def _kept_yarn(self, scaling: RopeScaling) -> list[float]:
        """Share of each pair's speed that is kept: a ramp between the pairs that make the two numbers of turns."""

        def pair_of(turns: float) -> float:
            return self.dim * math.log(scaling.old_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = high - low or 0.001
        return [1.0 - min(1.0, max(0.0, (pair - low) / span)) for pair in range(self.dim // 2)]
