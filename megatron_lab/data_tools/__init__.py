"""Tools for training data.

They preprocess texts, train tokenizers, check datasets, provide the sample order of Megatron-LM, and show which documents the
samples of a run come from.
"""
