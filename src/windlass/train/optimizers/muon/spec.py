"""State of Muon: one running mean for matrices of layers, AdamW's two for everything else."""

from windlass.train.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(
    moments=("exp_avg", "exp_avg_sq"),
    update="windlass.train.optimizers.muon.update:Muon",
    matrix_moments=("exp_avg",),
)
