"""Rules about combinations of settings, by topic. `megatron.config.rules` evaluates them."""
