"""One GPT that covers GPT-2 and Llama by settings. Reads like the one-process model."""
