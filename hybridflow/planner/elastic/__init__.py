"""Devices move inside an iteration: `state` (read first), `transitions`, `policies`, `gain`; their `simulation`."""
