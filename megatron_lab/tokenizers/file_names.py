"""Names of the files of a Hugging Face tokenizer, and of the options of a token in them."""

from __future__ import annotations

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
COMPANION_FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
"""Files next to a tokenizer.json that can add tokens to it, or name its special tokens."""
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
TOKEN_ID_FILES = (GENERATION_CONFIG, MODEL_CONFIG)
"""Files next to a tokenizer that contain the ids of its special tokens. The first also contains settings for generation."""
TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Fields of an added token besides its id and its text."""
