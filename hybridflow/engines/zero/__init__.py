"""ZeRO stages 1 and 2: whole parameters on every data parallel rank, optimizer state (and gradients) cut over them."""
