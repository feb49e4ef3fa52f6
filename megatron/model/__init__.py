"""One GPT that covers GPT-2 and Llama by settings. It reads like a model for one process."""
