"""Device policies inside an iteration: `state` (read first), `policies`, `gain`, and their simulation."""
