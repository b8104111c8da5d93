"""Checkpoints: save (sharded, asynchronous), load (any world size), keep (rules), files (names, manifest, checksums).

`files` and `keep` need no torch; `save`, `load` and `stage` do, so nothing is imported here.
"""
