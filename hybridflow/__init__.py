"""hybridflow: reinforcement learning of language models as one driver script."""
