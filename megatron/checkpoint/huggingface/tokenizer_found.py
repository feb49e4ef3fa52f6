"""Which tokenizer of ours reads the files of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megatron.config.data import DataConfig


def find_tokenizer(folder: Path, model_type: str, notes: list[str]) -> DataConfig | None:
    """The settings of the tokenizer in a folder, or None, which is noted."""
    if (folder / "tokenizer.json").is_file():
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json"))
    if (folder / "tokenizer.model").is_file():
        return DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "tokenizer.model"))
    # The files do not say how text is split before it is merged, which is known for GPT-2 alone.
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if model_type == "gpt2" and vocabulary.is_file() and merges.is_file():
        return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocabulary), merge_file=str(merges))
    notes.append(
        f"{folder} holds no tokenizer that is known: no tokenizer.json, tokenizer.model, or (of GPT-2) vocab.json with merges.txt"
    )
    return None
