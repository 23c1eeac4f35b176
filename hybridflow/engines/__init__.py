"""Engines: training (`train_engine`, one folder per backend) and generation (vllm/); `contract` has their types."""
