"""Making and checking datasets and tokenizers."""
