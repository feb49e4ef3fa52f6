"""Readers of model weights from the checkpoints of several programs. Every reader provides complete (unsharded) tensors.

The readers support checkpoints of this framework, Hugging Face folders, and checkpoints of Megatron-LM and Megatron-Core. From the
latter two, they also read the optimizer state and the counters of the run. `huggingface` also describes the config fields and the
tensors that a Hugging Face folder must have, for the exporter.
"""
