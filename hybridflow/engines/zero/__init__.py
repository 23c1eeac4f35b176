"""ZeRO stages 1 and 2: whole parameters on every data parallel rank, sharded optimizer state (and gradients)."""
