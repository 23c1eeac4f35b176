"""Prompts and texts from files and data sets.

`prompts` and `lm_dataset` draw batches through the `resumable_sampler`; `records` reads files.
"""
