"""Conversion of models from and to the format of Hugging Face transformers: settings, tensor names, tensor layouts and files."""
