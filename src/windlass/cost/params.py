"""How many parameters does a model have? Exact counts, term by term."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from windlass.cost.shapes import Shape


@dataclass(frozen=True, slots=True)
class Params:
    total: int
    """With the true vocabulary: what a paper prints."""
    stored: int
    """With the padded vocabulary: what lies in memory and in a checkpoint."""
    embedding: int
    """Input embedding (true vocabulary) and learned positions."""
    head: int
    """Output matrix (true vocabulary); 0 when it is the embedding itself."""
    body: int
    """All layers and the norms outside them."""
    per_layer: int
    matrices: int
    """Weights of all layers that take part in a matrix product."""
    terms: dict[str, int]
    """Where they are; sums to `total`."""

    @property
    def active(self) -> int:
        """Parameters that multiply each token: without the input embedding, with the head even where it is tied."""
        return self.body + (self.head or self.terms["embedding"])


@lru_cache(maxsize=512)
def count(shape: Shape) -> Params:
    layer = _retnet_layer(shape) if shape.arch == "retnet" else _attention_layer(shape)
    norm = shape.width * (2 if shape.layer_norm else 1)
    table = shape.vocab * shape.width
    terms = {name: value * shape.layers for name, value in layer.items()}
    terms["final norm"] = norm * (2 if shape.embedding_norm else 1)
    terms["embedding"] = table
    terms["positions"] = shape.positions * shape.width
    terms["head"] = 0 if shape.tied else table
    total = sum(terms.values())
    padding = (shape.padded_vocab - shape.vocab) * shape.width * (1 if shape.tied else 2)
    per_layer = sum(layer.values())
    return Params(
        total=total,
        stored=total + padding,
        embedding=table + terms["positions"],
        head=terms["head"],
        body=per_layer * shape.layers + terms["final norm"],
        per_layer=per_layer,
        matrices=sum(v for k, v in layer.items() if k in _MATRICES) * shape.layers,
        terms=terms,
    )


_MATRICES = ("query", "key and value", "gate", "attention output", "feed-forward")


def _attention_layer(s: Shape) -> dict[str, int]:
    query, kv = s.width * s.attention_width, 2 * s.width * s.kv_width
    bias = s.attention_width + 2 * s.kv_width + s.width + s.ffn * (2 if s.glu else 1) + s.width
    return {
        "query": query,
        "key and value": kv,
        "attention output": query,
        "feed-forward": (3 if s.glu else 2) * s.width * s.ffn,
        "norms": 2 * s.width * (2 if s.layer_norm else 1),
        "biases": bias if s.biases else 0,
    }


def _retnet_layer(s: Shape) -> dict[str, int]:
    """Queries and keys d x d, values, gate and output d x dv, a gated feed-forward block, two norms: 2d^2 + 3 d dv + 3 d ffn + 2d."""
    return {
        "query": s.width * s.width,
        "key and value": s.width * s.width + s.width * s.value_width,
        "gate": s.width * s.value_width,
        "attention output": s.value_width * s.width,
        "feed-forward": 3 * s.width * s.ffn,
        "norms": 2 * s.width,
    }


def textbook(layers: int, width: int, vocab: int) -> int:
    """N = hV + L(12 h^2 + 13 h) + 2h: a GPT-2-like model with tied embeddings and no learned positions."""
    return width * vocab + layers * (12 * width * width + 13 * width) + 2 * width
