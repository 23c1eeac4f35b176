"""Runs a plan over torch.distributed.

`transfer` is the entry. `handshake` agrees on dtypes, `buffers` packs and sends a round.
"""
