"""Rules about combinations of settings, one module per topic. `megatron.config.rules` evaluates them before a run starts."""
