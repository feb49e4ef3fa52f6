"""GPT model: one model class that settings turn into GPT-2, Llama and similar models. Its code reads like a model for one
process."""

from megatron.moved import find_moved

find_moved()
