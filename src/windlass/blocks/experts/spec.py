"""Sizes and costs of a mixture of experts: a router, experts of which each token uses a few, and shared ones."""

from dataclasses import dataclass

from windlass.blocks.interface import BlockSpec, Product
from windlass.config.model import GATED
from windlass.layout.types import Layout, StepSpec

# Rows of the fullest expert-parallel rank relative to the mean, over all layers, where routing is not forced to be
# even. Assumed: layers, and the experts of a rank, even out among themselves. Each layer alone is less even
# (`Constants.imbalance`).
RANK_IMBALANCE = 1.1


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(BlockSpec):
    width: int
    hidden: int  # inner size of one expert
    count: int
    top_k: int
    shared_hidden: int = 0  # of all shared experts together; 0: there are none
    activation: str = "swiglu"
    clamp: tuple[float, float] = (1.702, 7.0)  # of `clamped_swiglu`: alpha and limit
    bias: bool = False  # of the router and of every product of the experts
    router: str = "softmax"
    renormalise: bool = True
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
    balance_strength: float = 0.0  # factor of the balance loss; 0: there is none
    bias_step: float = 0.0  # of the bias that balances the choice of experts; 0: there is none
    z_loss: float = 0.0

    kind = "experts"

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def params(self) -> dict[str, int]:
        matrices = 3 if self.gated else 2
        terms = {"experts": matrices * self.count * self.width * self.hidden, "router": self.count * self.width}
        if self.shared_hidden:
            terms["shared experts"] = matrices * self.width * self.shared_hidden
        if self.bias:
            terms["biases"] = self.count * (1 + (matrices - 1) * self.hidden + self.width)
        return terms

    def expert_params(self) -> int:
        biases = self.params()["biases"] - self.count if self.bias else 0  # the router's stay on every rank
        return self.params()["experts"] + biases

    def active_params(self) -> int:
        inner = (2 if self.gated else 1) * self.hidden
        biases = self.count + self.top_k * (inner + self.width) if self.bias else 0
        return biases + sum(product.weights for product in self.products())

    def products(self) -> tuple[Product, ...]:
        used, experts = self.top_k * self.hidden, {"experts": self.count, "top_k": self.top_k}
        products: tuple[Product, ...] = (
            Product("router", self.count, self.width, "", "input"),
            # Read apart: the two grouped products do not run as one.
            Product("gate", used, self.width, "outputs", "gate rows", **experts),
            Product("up", used, self.width, "outputs", "up rows", **experts),
            Product("down", self.width, used, "inputs", "hidden", **experts),
        )
        if self.shared_hidden:
            products += (
                Product("shared gate", self.shared_hidden, self.width, "outputs", "shared input"),
                Product("shared up", self.shared_hidden, self.width, "outputs", "shared input"),
                Product("shared down", self.width, self.shared_hidden, "inputs", "shared hidden"),
            )
        return products if self.gated else tuple(p for p in products if "gate" not in p.name)

    masks_documents = True
    kept_by_selective = True

    def routing_bytes(self) -> float:
        """Logits and scores in fp32; ids and weights of the experts used, and the order of rows with its inverse."""
        return 8.0 * self.count + (8.0 + 4.0 + 16.0) * self.top_k

    def kept_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Routing, the sorted copies of each token, and gate, up and their weighted product (63.3 and 92.1 GiB measured
        on an H200, as counted here); eager code also keeps the activated gate and the product before its weights.
        Without a gate: up and its weighted activation, eager code also the activation."""
        if "moe" in step.recomputed:
            return 0.0
        size, full = step.bytes_per_value, self.fullest(step, layout)
        hidden = (full * self.top_k * self.hidden + self.shared_hidden) / layout.tensor
        rows = full * step.bytes_per_input * self.top_k * self.width * layout.expert_row_share
        product = 0.0 if "moe_act" in step.recomputed else step.bytes_per_input * hidden
        eager = 7.0 if self.activation == "clamped_swiglu" else 4.0
        values = (2.0 if step.compile else eager) if self.gated else (1.0 if step.compile else 2.0)
        # Which expert each row is of, plain and weighted.
        members = 2.0 * full * size * self.top_k * self.count / layout.expert if self.bias else 0.0
        return self.routing_bytes() + rows + product + members + size * hidden * values

    def fullest(self, step: StepSpec, layout: Layout) -> float:
        """Rows of the fullest rank relative to those of its own tokens."""
        return RANK_IMBALANCE if layout.expert > 1 and not step.balanced else 1.0

    def transient_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Gradients of the sorted copies, by gate and by up, and of the product between them; an exchange also holds
        what is sent."""
        rows = (2.0 if self.gated else 1.0) * self.top_k * self.width * layout.expert_row_share
        hidden = self.top_k * self.hidden / layout.tensor
        held = self.fullest(step, layout) * (rows + hidden * (1.0 if step.recompute == "none" else 2.0))
        return step.bytes_per_value * held + self.exchanged_bytes(step, layout)

    def moved_bytes(self, step: StepSpec, layout: Layout) -> float:
        """Scores of all experts, copies of each token to its experts and back, and the activation."""
        size, hidden = step.bytes_per_value, (self.top_k * self.hidden + self.shared_hidden) / layout.tensor
        copies = 2.0 * size * (self.top_k + 1) * self.width * layout.expert_row_share
        activated = 16.0 if step.native and not step.compile else (3.0 if self.gated else 2.0) * size
        if step.dispatch == "alltoall":
            # Received rows are sorted by expert and put back, each read and written: as often in the backward pass,
            # which counts twice here.
            copies += 4.0 * (2.0 / 3.0) * self.exchanged_bytes(step, layout)
        return 2.0 * self.routing_bytes() + copies + activated * hidden

    def exchanged_bytes(self, step: StepSpec, layout: Layout) -> float:
        ranks, copies = layout.expert, float(self.top_k)
        if ranks == 1:
            return 0.0
        if step.dispatch == "fused":  # ranks that hold at least one of the experts used
            copies = ranks * (1.0 - (1.0 - 1.0 / ranks) ** self.top_k)
        elif step.dispatch == "allgather":
            copies = float(ranks)
        # Other engines divide the rows of a tensor-parallel group before they send them.
        return step.bytes_per_value * copies * self.width / (1.0 if step.native else layout.sequence_split)

    def context_bytes(self, step: StepSpec, layout: Layout) -> float:
        return 0.0

    def divides(self, axis: str) -> tuple[tuple[str, int], ...] | None:
        if axis == "expert":
            return (("model.experts.count", self.count),)
        if axis != "tensor":
            return ()
        shared = (("model.experts.shared_ffn", self.shared_hidden),) if self.shared_hidden else ()
        return (("model.experts.ffn", self.hidden), *shared)
