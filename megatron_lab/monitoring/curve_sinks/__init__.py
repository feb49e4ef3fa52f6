"""Outputs of curves: TensorBoard, Weights & Biases, MLflow and trackio. `megatron_lab/monitoring/loggers.py` imports those that the
settings enable."""
