"""Weights out of Megatron-LM's checkpoints in its format `torch`: a pickled model_optim_rng.pt from each model-parallel rank."""
