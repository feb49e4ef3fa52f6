"""Models in the format of Hugging Face's transformers, both ways: settings, names and layouts of tensors, files."""
