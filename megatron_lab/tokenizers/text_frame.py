"""Ids that a tokenizer.json puts around each text: the special tokens that its post-processor adds.

transformers 5 follows the post-processor, and ignores `add_bos_token` and `add_eos_token` of tokenizer_config.json
(`PreTrainedTokenizerBase._from_pretrained`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_lab.tokenizers.tokenizer_json import TokenizerJson


class TextFrame(NamedTuple):
    """Ids that a post-processor puts before and after each text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


def read_text_frame(file: TokenizerJson) -> TextFrame:
    """Read the ids that the post-processor of a tokenizer.json adds to a single text.

    Raises:
        ValueError: the post-processor has an unknown form, or adds an id that no token has.
    """
    processor = file.document.get("post_processor")
    try:
        frame = _read_processor(processor)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"--tokenizer-model {file.path}: its post_processor is none that the tokenizers library writes ({error}).\n"
            "  The file is damaged or has another format: copy it again."
        ) from error
    unknown = {*frame.prefix, *frame.suffix} - {*file.ids.values()} if processor else set()
    if unknown:
        raise ValueError(
            f"--tokenizer-model {file.path}: its post_processor adds the id {min(unknown)}, which no token has.\n"
            "  The file is damaged or was edited: use the original file."
        )
    return frame


def build_template_processor(frame: TextFrame, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the section `post_processor` of a tokenizer.json that adds these ids to each text.

    Args:
        names: text of each of the ids.
    """

    def build_items(sequence_name: str, type_id: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": names[id], "type_id": type_id}} for id in ids] for ids in (frame.prefix, frame.suffix)
        )
        return [*before, {"Sequence": {"id": sequence_name, "type_id": type_id}}, *after]

    first, second = build_items("A", 0), build_items("B", 1)
    ids = dict.fromkeys((*frame.prefix, *frame.suffix))
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": {names[id]: {"id": names[id], "ids": [id], "tokens": [names[id]]} for id in ids},
    }


def format_ids(ids: Sequence[int], names: Mapping[int, str]) -> str:
    """Return the texts of tokens with their ids, for messages: "<s> (1)"."""
    return ", ".join(f"{names[id]} ({id})" if id in names else str(id) for id in ids)


def _read_processor(processor: Any) -> TextFrame:
    """Return the ids that a post-processor adds to a single text.

    Raises:
        ValueError: its type is unknown, or several of its steps add ids.
    """
    if processor is None:
        return TextFrame()
    kind = processor["type"]
    if kind == "ByteLevel":
        return TextFrame()
    if kind in ("BertProcessing", "RobertaProcessing"):
        return TextFrame((int(processor["cls"][1]),), (int(processor["sep"][1]),))
    if kind == "Sequence":
        frames = [frame for frame in map(_read_processor, processor["processors"]) if any(frame)]
        if len(frames) > 1:
            raise ValueError("a sequence in which several steps add tokens")
        return frames[0] if frames else TextFrame()
    if kind != "TemplateProcessing":
        raise ValueError(f"type {kind}")
    return _read_template(processor["single"], processor["special_tokens"])


def _read_template(items: Sequence[Any], special_tokens: Mapping[str, Any]) -> TextFrame:
    """Return the ids before and after the text in a template.

    Raises:
        ValueError: the text does not occur exactly once.
    """
    positions = [i for i, item in enumerate(items) if "Sequence" in item]
    if len(positions) != 1:
        raise ValueError(f"a template with the text {len(positions)} times")

    def collect(part: Sequence[Any]) -> tuple[int, ...]:
        return tuple(int(id) for item in part for id in special_tokens[item["SpecialToken"]["id"]]["ids"])

    return TextFrame(collect(items[: positions[0]]), collect(items[positions[0] + 1 :]))
