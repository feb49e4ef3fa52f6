"""Special tokens and sampling settings for the generation_config.json of an export.

A published model may name several tokens that end a text, and sampling settings, in its generation_config.json. An import copies
the file next to the tokenizer. An export writes its content again, with the special tokens of the run's tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.data import TOKENIZER_FILE_SETTINGS, DataConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lab.tokenizers.stop_ids import read_eos_ids, read_generation_config

_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FILE_FIELDS = (*_TOKEN_FIELDS, "transformers_version", "_from_model_config")
"""Fields of generation_config.json that describe the file, or that an export determines itself."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens for config.json and generation_config.json: beginning of a text, end of a text, padding. None if
    not known."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    stop_ids: tuple[int, ...] = ()
    """All ids that end a generated text, among them `eos`, in the order for the files. Empty: only `eos`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Further fields of generation_config.json, such as `temperature` and `top_p`."""

    def to_json(self) -> dict[str, int | list[int] | None]:
        """Return the ids by the keys that transformers uses in config.json, such as `bos_token_id`. If several ids end a text,
        `eos_token_id` is a list."""
        eos = list(self.stop_ids) if len(self.stop_ids) > 1 else self.eos
        return dict(zip(_TOKEN_FIELDS, (self.bos, eos, self.pad), strict=True))

    def build_generation_config(self) -> dict[str, Any]:
        """Return the content of generation_config.json."""
        return {name: value for name, value in self.to_json().items() if value is not None} | self.sampling


NO_TOKENS = SpecialTokens()
"""Special tokens of a model without a tokenizer."""


def find_special_tokens(
    config: DataConfig, vocab_size: int, *, chat_template: str | None = None
) -> tuple[SpecialTokens, list[str]]:
    """Find the special tokens and sampling settings of a model from its tokenizer and the files next to it.

    These ids end a text: those in generation_config.json and config.json next to the tokenizer; the tokenizer's end-of-document
    token; and the token that the chat template writes after each answer.

    Args:
        config: settings that select the tokenizer.
        vocab_size: number of rows of the word embedding.
        chat_template: chat template that replaces that of the tokenizer: a file, or the name of a built-in one.

    Returns:
        The tokens, and notes for the user.

    Raises:
        ValueError: a file of the tokenizer is damaged, or `chat_template` cannot be used with it.
    """
    tokenizer, folder = build_tokenizer(config), _find_folder(config)
    listed_ids = [] if folder is None else read_eos_ids(folder)
    generation_config = {} if folder is None else read_generation_config(folder)
    ids = [*listed_ids, *({tokenizer.eod} - {*listed_ids})]
    answer_ids, notes = _find_answer_end(tokenizer, chat_template)
    ids += [id for id in answer_ids if id not in ids]
    if removed := [id for id in ids if id >= vocab_size and id != tokenizer.eod]:
        ids = [id for id in ids if id not in removed]
        notes.append(f"the ids {', '.join(map(str, removed))}, which end a text, have no row in the embedding: they are left out")
    if len(ids) > 1:
        notes.append(f"the ids {', '.join(map(str, ids))} end a generated text (eos_token_id)")
    sampling = {name: value for name, value in generation_config.items() if name not in _FILE_FIELDS and value is not None}
    return SpecialTokens(tokenizer.bos, tokenizer.eod, tokenizer.pad, tuple(ids), sampling), notes


def _find_folder(config: DataConfig) -> Path | None:
    """Return the folder of a tokenizer's files; None if it has no files."""
    paths = [Path(path) for name in TOKENIZER_FILE_SETTINGS if (path := getattr(config, name)) is not None]
    return None if not paths else paths[0] if paths[0].is_dir() else paths[0].parent


def _find_answer_end(tokenizer: Tokenizer, chat_template: str | None) -> tuple[list[int], list[str]]:
    """Return the ids that end an answer according to the chat template, and notes for the user."""
    from megatron_lab.inference.chat_format import ChatFormat
    from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
    from megatron_lab.tokenizers.template_files import read_chat_templates

    if chat_template is None and not (isinstance(tokenizer, HuggingFaceTokenizer) and read_chat_templates(tokenizer.path.parent)):
        return [], []
    try:
        chat_format = ChatFormat(tokenizer, chat_template)
    except ValueError as error:
        if chat_template is not None:
            raise
        return [], [f"the chat template was not run, so the end of an answer is not known: {error}"]
    notes = []
    if chat_format.stop_text is not None:
        notes.append(
            f"the chat template ends an answer by {chat_format.stop_text!r}, which is not a token of its own: programs that "
            "generate answers must get it as a stop string"
        )
    return sorted(chat_format.stop_ids), notes
