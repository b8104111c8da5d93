"""Checkpoints: files (names, manifest, checksums), save (sharded, asynchronous), load (any layout), keep (retention).

`files`, `keep`, `missing` and `inventory` need no torch; `save`, `load` and `stage` do, so nothing is imported here.
"""
