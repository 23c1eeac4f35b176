"""FSDP2, HSDP, their combination with tensor parallelism, and ZeRO."""
