"""Translation of launch scripts of Megatron-LM into this project's flags."""
