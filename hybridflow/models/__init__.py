"""Canonical tensors of a model: `spec` for four families, `hf_spec` for any other decoder of transformers.

`causal` checks that a decoder does not see later tokens, `packing_support` that its rows can be packed.
"""
