"""The smallest recipe, as the tables of a sweep file: one text for all tests that only need some recipe."""

from __future__ import annotations


def recipe_tables(*, cluster: str | None = None, batch_tokens: int = 1024, steps: int = 4, train: str = "") -> str:
    """`[recipe]` and its tables; `train` holds further lines of `[recipe.train]`."""
    place = "" if cluster is None else f'cluster = "{cluster}"\n'
    return f"""
[recipe]
name = "base"
{place}[recipe.model]
layers = 2
width = 64
ffn = 128
heads = 4
vocab = 256
[recipe.data]
seq_len = 64
batch_tokens = {batch_tokens}
[recipe.train]
steps = {steps}
{train}
"""
