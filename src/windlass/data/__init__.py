"""Sources and provenance, tokenise, token store, mix, sampler, loader. Importing this room loads neither torch nor a tokenizer."""
