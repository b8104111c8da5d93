"""State of SGD with momentum: the velocity."""

from windlass.train.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(moments=("momentum",), update="windlass.train.optimizers.sgd.update:SGD")
