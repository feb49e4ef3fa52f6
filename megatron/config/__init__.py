"""What a user may set: dataclasses by topic, the flags and YAML made from them, and every rule between them."""
