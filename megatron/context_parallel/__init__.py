"""Context ranks share each sequence: who holds which tokens, and attention across them."""
