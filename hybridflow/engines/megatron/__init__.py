"""Training with Megatron-core: `engine.MegatronEngine` fulfils `engines.contract.TrainEngine`."""
