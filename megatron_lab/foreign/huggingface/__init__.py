"""Converts models from and to the format of Hugging Face's transformers: settings, names and layouts of tensors, files."""
