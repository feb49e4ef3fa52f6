"""Weights of whole models in folders of any program: reads checkpoints of Megatron-LM and Megatron-Core, with the state of their
runs, Hugging Face folders, and checkpoints of runs here; knows fields and tensors of a Hugging Face folder, for who writes one."""
