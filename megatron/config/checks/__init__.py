"""The rules between settings, by topic; `megatron.config.rules` runs them."""
