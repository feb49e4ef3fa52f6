"""Tokenizers of sentencepiece model files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class SentencePieceTokenizer:
    """A sentencepiece model. The end of a document is the model's end-of-sentence id.

    Args:
        path: Model file (``--tokenizer-model``).
        add_bos: Put the model's beginning-of-sentence id before each text, as Llama 2 was trained.

    Raises:
        ValueError: not a sentencepiece model, or one without the ids that are needed.
    """

    def __init__(self, path: Path, *, add_bos: bool = False) -> None:
        from sentencepiece import SentencePieceProcessor  # only who uses it pays for the import

        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"--tokenizer-model {path} is not a sentencepiece model: {error}") from error
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        self._first: list[int] = [self._model.bos_id()] if add_bos else []
        for name, id in (("eos", self.eod), ("bos", min(self._first, default=0))):
            if id < 0:
                raise ValueError(
                    f"--tokenizer-model {path} has no {name} id, which this tokenizer type needs.\n"
                    f"  Train the model with {name}_id set (sentencepiece's default)."
                )

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with bos before them if asked for."""
        ids: list[int] = self._model.encode(text)
        return self._first + ids if ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids. The model's own normalisation (of blanks, for example) is not undone."""
        text: str = self._model.decode([int(id) for id in ids if id != self.eod])
        return text
