"""A byte-level BPE vocabulary from GPT-2's or tiktoken's files as Hugging Face's tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.data.tokenizers.bpe_rules import GPT2_PATTERN, ByteVocabulary, MergeRules, RankRules, byte_characters


def byte_level_json(vocabulary: ByteVocabulary, special: Mapping[int, str]) -> dict[str, Any]:
    """The content of a tokenizer.json that gives the same ids.

    Args:
        special: names of special ids, which no text gives.
    """
    character = {byte: sign for sign, byte in byte_characters().items()}

    def written(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level
    if vocabulary.pattern != GPT2_PATTERN:
        split = {"type": "Split", "pattern": {"Regex": vocabulary.pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    rules = vocabulary.rules
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for id, name in sorted(special.items())
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": isinstance(rules, RankRules) or bool(rules.whole),
            "vocab": {written(token): id for token, id in vocabulary.ids.items()} | {name: id for id, name in special.items()},
            "merges": [f"{written(left)} {written(right)}" for left, right in _merges(rules)],
        },
    }


def _merges(rules: MergeRules | RankRules) -> list[tuple[bytes, bytes]]:
    """The pairs to be joined, the first to be joined first.

    By ranks, any two neighbours are joined that make a token, those that make the lowest first: so all pairs that make the same
    token follow each other.
    """
    if isinstance(rules, MergeRules):
        return sorted(rules.ranks, key=rules.ranks.__getitem__)
    ranks = rules.ranks
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found
