"""Readers of model weights from the checkpoints of several programs. Every reader provides complete (unsharded) tensors.

The readers support checkpoints of this framework, Hugging Face folders, and checkpoints of Megatron-LM and Megatron-Core. From the
checkpoints of Megatron-LM and Megatron-Core, they also read the optimizer state and the counters of the run. The package
`huggingface` also describes the config.json fields and the tensors of a Hugging Face folder. The exporter uses this description.
"""
