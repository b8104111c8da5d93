"""State of Lion: one running mean of the gradient."""

from windlass.train.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(moments=("exp_avg",), update="windlass.train.optimizers.lion.update:Lion")
