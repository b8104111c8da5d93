"""windlass takes a team from a compute allocation to a trained language model on a public supercomputer."""

__version__ = "0.1.0"
