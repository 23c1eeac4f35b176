"""FSDP2, HSDP and their combination with tensor parallelism: where torch's DTensors keep which boxes."""
