"""The rules between settings, a file a topic; `megatron.config.rules` runs them."""
