"""Training and generation behind `contract`: `train_engine` with one folder per backend, and vllm/."""
