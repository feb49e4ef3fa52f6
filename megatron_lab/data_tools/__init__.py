"""Tools for training data.

They preprocess texts, train tokenizers, check datasets, read in the sample order of Megatron-LM, and show the lineage of a run's
samples.
"""
