"""Runs a plan over torch.distributed.

`transfer` is the entry. `handshake` agrees on dtypes, `buffers` packs and sends a round,
`peer_memory` reads from processes of the same host.
"""
