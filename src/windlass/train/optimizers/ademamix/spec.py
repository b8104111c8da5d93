"""State of AdEMAMix: AdamW's two running means, and a slow one of the gradient."""

from windlass.train.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(
    moments=("exp_avg", "exp_avg_sq", "exp_avg_slow"), update="windlass.train.optimizers.ademamix.update:AdEMAMix"
)
