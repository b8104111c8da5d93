"""The micro-batches of a batch through the stages of a pipeline."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, cast

from torch import Tensor

from windlass.models.decoder import DecoderModel
from windlass.train.mesh import World
from windlass.train.parallelize import ModelParts
from windlass.train.targets import TargetBatch


class Pipeline:
    """This rank's stages and the schedules that move micro-batches through them."""

    def __init__(self, parts: ModelParts, world: World, loss: Callable[[Tensor], Tensor]) -> None:
        """`loss` makes the number to descend from what the head returns for a micro-batch."""
        self.parts, self.world, self.loss = parts, world, loss
        # Micro-batches -> schedule. A batch ramp needs one for each size.
        self._schedules = dict[int, Any]()
        self._outputs = list[Tensor]()

    def run(self, method: Literal["step", "eval"], part: TargetBatch) -> list[Tensor]:
        """What the head returns for each micro-batch; empty on ranks that do not hold the last stage."""
        micro_batches = len(part.inputs) // self.world.layout.micro_batch
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = self._schedule(micro_batches)
        schedule, stages = self._schedules[micro_batches], self.parts.stages
        # Every stage gets the document numbers; the one with the head also the targets, as input and for the loss.
        keywords: dict[str, Any] = {} if part.documents is None else {"documents": part.documents}
        if self.parts.num_stages - 1 in stages:
            keywords |= {"targets": part.targets, "target": part.targets}
        # Without this the last stage keeps its outputs of all micro-batches; older releases of torch do not have it.
        if "return_outputs" in inspect.signature(schedule.step).parameters:
            keywords["return_outputs"] = False
        self._outputs.clear()
        getattr(schedule, method)(*((part.inputs,) if 0 in stages else ()), **keywords)
        # Before its first batch a schedule runs a stage once to learn its shapes; that output is not of the batch.
        return self._outputs[-micro_batches:]

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._outputs.append(output.detach())
        return self.loss(output)

    def _schedule(self, micro_batches: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules

        class DecoderStage(PipelineStage):
            def _post_metadata_inference_cleanup(self) -> None:
                """Before its first batch a schedule runs each stage once to learn its shapes; that does not count."""
                super()._post_metadata_inference_cleanup()
                module = cast(DecoderModel, self.submod)
                for counter in (*module.blocks(), *(() if module.observer is None else (module.observer,))):
                    counter.clear_counts()

            # Schedule zbv hands gradients from one stage of a rank to the other even in a pass without gradients, which
            # torch 2.13 refuses.
            def get_local_bwd_output(self, mb_index: int) -> Any:
                stage: Any = super()
                return stage.get_local_bwd_output(mb_index) if self.has_backward else ()

            def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
                if self.has_backward:
                    super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

        parts, world = self.parts, self.world
        assert world.mesh is not None
        pipeline_stages = [
            DecoderStage(module, index, parts.num_stages, world.device, group=world.mesh.get_group("pp"))
            for module, index in zip(parts.modules, parts.stages, strict=True)
        ]
        make = {
            "1f1b": schedules.Schedule1F1B,
            "gpipe": schedules.ScheduleGPipe,
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zbv": schedules.ScheduleZBVZeroBubble,
        }[world.layout.schedule]
        first = pipeline_stages[0] if len(pipeline_stages) == 1 else pipeline_stages
        return make(first, micro_batches, loss_fn=self._loss, scale_grads=False)
