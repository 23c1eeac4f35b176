"""Where vLLM keeps the weights of a model without a layout of ours: read on at `probe.py`, the entry.

`encode.py` makes the values that its loader is given, `regions.py` reads boxes off what the loader wrote.
"""
