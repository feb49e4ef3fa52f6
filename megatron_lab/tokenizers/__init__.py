"""Tokenizers by the files of other programs: of GPT-2, tiktoken and Hugging Face."""
