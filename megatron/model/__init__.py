"""One GPT that covers GPT-2 and Llama by settings. It reads like a model for one process."""

from megatron.moved import find_moved

find_moved()
