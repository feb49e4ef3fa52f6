"""Tokenizers that read the files of other programs: GPT-2, tiktoken and Hugging Face."""
