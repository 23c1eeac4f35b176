"""Devices move inside an iteration: `state` (read first), `policies`, and their `simulation`."""
