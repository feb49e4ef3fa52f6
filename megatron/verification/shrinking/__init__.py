"""How each part of a run's settings is made small; `megatron.verification.shrink` puts the parts together."""
