"""Fixtures shared with tests/convert."""

from tests.model_runs import corpus, hybrid_run, llama_run, make_run, make_store, retnet_run, store, tokenizer  # noqa: F401
