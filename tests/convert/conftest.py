"""Fixtures shared with tests/evaluate."""

from tests.model_runs import corpus, llama_run, make_run, make_store, retnet_run, store, tokenizer  # noqa: F401
