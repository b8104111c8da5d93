"""State of AdamW: running means of the gradient and of its square."""

from windlass.train.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(moments=("exp_avg", "exp_avg_sq"), update="windlass.train.optimizers.adamw.update:AdamW")
