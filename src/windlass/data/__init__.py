"""Sources and provenance, tokenise, token store, mix, sampler, loader."""
