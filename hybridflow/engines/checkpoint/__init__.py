"""Hugging Face directories of safetensors: `reader` checks and reads them box by box, `writer` writes them."""
