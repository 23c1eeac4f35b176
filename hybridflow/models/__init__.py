"""Canonical tensors of a model: `spec` for four families, `hf_spec` for any other decoder of transformers."""
