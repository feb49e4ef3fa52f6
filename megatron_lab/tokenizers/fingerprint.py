"""Fingerprint of a tokenizer: what its ids are, independent of the format of its files.

A fingerprint contains a hash of the ids of each probe text. So the same tokenizer has the same fingerprint as vocab.json and
merges.txt, as tokenizer.json, and as a sentencepiece model. A tokenizer to which tokens were added still has the ids of ordinary
text, so it fits the datasets and weights of the original tokenizer.

The fingerprint of a dataset PREFIX is in the file PREFIX.tokenizer, that of a checkpoint in its config.json.
"""

# ruff: noqa: RUF001 - the probe texts have letters of other alphabets
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.data import TOKENIZER_FILE_SETTINGS, TOKENIZER_SETTINGS, DataConfig
from megatron.config.regular_file import parse_json, read_regular
from megatron.config.save import check_json_type
from megatron.data.indexed_dataset import get_tokenizer_file
from megatron.data.tokenizer import Tokenizer, build_tokenizer

PROBE_TEXTS = {
    "English": "The quick brown fox jumps over the lazy dog. However, nobody at the University of Cambridge had noticed it before "
    "1998; since then, it's been described (rather often) as \"a perfectly ordinary sentence\" -- isn't that strange?",
    "capital letters": "NATO and UNESCO, iPhone, McDonald's, LaTeX, WHO'S THERE? helloWorld HelloWORLD parseHTTPResponse",
    "numbers": "0 7 42 1998 31415926535 1,234,567.89 -0.5e-10 2024-05-31T23:59:59Z 192.168.0.1 0xDEADBEEF 50% 10^6",
    "whitespace": "a  b   c    d\te\t\tf\n\ng\n\n\n    h\n\t\ti        j",
    "Python": 'def main(argv: list[str]) -> int:\n    for i, x in enumerate(argv[1:], start=1):\n        if x != "--help":\n'
    "            print(f\"{i:>3}: {x!r}\")  # TODO\n    return 0\n\n\nif __name__ == '__main__':\n    sys.exit(main(sys.argv))\n",
    "C++": "#include <vector>\ntemplate <typename T>\nstatic inline T* f(const std::vector<T>& v) {\n\treturn v.empty() ? "
    "nullptr : &v[0]; // ->*\n}\n",
    "markup": '<div class="a-b">R&amp;D</div>\n\\frac{\\partial L}{\\partial x_i} = \\sum_{j=1}^{n} w_{ij}\n| a | b |\n|---|---|\n'
    "# Title\n* item **bold** `code`\nhttps://www.example.org/path?q=1&r=%20#top user@example.com",
    "Western Europe": "L'été dernier, où étaient les garçons ? Größe, Übermaß und Straßenbahn. El niño comió piñas; ¿cuántas? "
    "Não há coração. Ångström, smörgåsbord, kjærlighet, þorn.",
    "Eastern Europe": "Zażółć gęślą jaźń. Příliš žluťoučký kůň. Árvíztűrő tükörfúrógép. İstanbul'da ığdır çöğüş. Tiếng Việt "
    "có dấu.",
    "Cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак, ґанок, љубав.",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Μήνιν ἄειδε θεὰ.",
    "Arabic and Hebrew": "السلام عليكم ورحمة الله وبركاته. دیدار به قیامت. שלום עולם, מה שלומך?",
    "South Asia": "नमस्ते दुनिया, आप कैसे हैं? বাংলা ভাষা। தமிழ் மொழி. తెలుగు భాష.",
    "Thai and Ethiopic": "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง. ሰላም ልዑል።",
    "Chinese": "我能吞下玻璃而不伤身体。今天天气很好,我们去公园散步吧。繁體中文:臺灣、香港。",
    "Japanese and Korean": "いろはにほへと ちりぬるを。カタカナと漢字。안녕하세요, 세계! 대한민국의 수도는 서울입니다.",
    "symbols": "€£¥ © ® ™ § ¶ † • … — – “quotes” «guillemets» ½ ² ∑ ∫ √ ∞ ≠ ≤ → ⇒ ∀x∈ℝ ♥ ★ ✓ █ ─",
    "emoji": "😀 😂🤣 👍🏽 👨‍👩‍👧‍👦 🇫🇷🇯🇵 ❤️ 🚀🔥 🤷‍♀️",
}
"""Texts whose ids are hashed, by name. They contain no text that is usually an added token, such as ``<think>``. After a change of
the texts, `PROBES_VERSION` must be raised."""
PROBES_VERSION = 1
"""Version of `PROBE_TEXTS`. Fingerprints of different versions are not compared."""
CONFIG_ENTRY = "tokenizer_fingerprint"
"""Entry of the fingerprint in config.json of a checkpoint."""
_PLACEHOLDER = re.compile("unused|reserved|extra_id|placeholder|dummy", re.IGNORECASE)
"""Part of the names of added tokens without a meaning, which stand for tokens that are added later. Two tokenizers may have
different names for such an id."""
_MAX_NAMED_PROBES = 4
_MAX_NAMED_TOKENS = 3
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenizerFingerprint:
    """Fingerprint of a tokenizer: hashes of the ids of ordinary texts, and the ids that ordinary texts do not produce."""

    tokenizer_type: str
    """Value of --tokenizer-type, for messages. Tokenizers of different types can have the same ids."""
    file: str
    """Name of the tokenizer's file with that of its folder, for messages; empty for a tokenizer without files."""
    num_ids: int
    """Number of ids."""
    eod: int
    """Id that ends a document."""
    probes: dict[str, str] | None
    """Hash of the ids of each probe text, by the name of the text. None for NullTokenizer, whose texts consist of ids that another
    program has made."""
    version: int = PROBES_VERSION
    """Version of the probe texts."""
    added_tokens: dict[str, str] = field(default_factory=dict)
    """Text of each added token of tokenizer.json, such as the tokens of turns, by its id. Placeholders such as ``<unused7>`` are
    left out. Empty for tokenizers in other formats."""
    prefix_ids: list[int] | None = None
    """Ids that the tokenizer puts before each text, such as bos (`Tokenizer.prefix_ids`). None if they are not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint in JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: object, source: str) -> TokenizerFingerprint:
        """Build a fingerprint from the result of `to_json`. Entries of later versions are ignored.

        Args:
            source: file that has the content, for the error message.

        Raises:
            ValueError: the content is not a fingerprint.
        """
        try:
            check_json_type(content, cls, "", is_open=True)
        except ValueError as error:
            raise ValueError(
                f"{source} is not the fingerprint of a tokenizer: {error}. Copy the file again, or write it again."
            ) from error
        assert isinstance(content, dict)
        return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls) if field.name in content})

    @property
    def name(self) -> str:
        """Type and file of the tokenizer."""
        return f"{self.tokenizer_type} {self.file}".rstrip()

    def __str__(self) -> str:
        return f"{self.name} ({self.num_ids:,} ids, end of document {self.eod:,})"

    def is_comparable(self, other: TokenizerFingerprint) -> bool:
        """Return whether the ids of both tokenizers are known for the same texts."""
        return self.probes is not None and other.probes is not None and self.version == other.version

    def find_difference(self, other: TokenizerFingerprint) -> str | None:
        """Describe the probe texts for which two comparable tokenizers have different ids. Return None if all ids are equal."""
        assert self.probes is not None and other.probes is not None, "comparable"
        names = [name for name, digest in self.probes.items() if other.probes.get(name) != digest]
        if not names:
            return None
        named = ", ".join(names[:_MAX_NAMED_PROBES]) + (", ..." if len(names) > _MAX_NAMED_PROBES else "")
        return f"other ids for {len(names)} of {len(self.probes)} probe texts ({named})"

    def find_other_prefix(self, other: TokenizerFingerprint) -> str | None:
        """Describe the ids before each text if they differ between this tokenizer and another one. Return None if they are equal or
        not known."""
        if self.prefix_ids is None or other.prefix_ids is None or self.prefix_ids == other.prefix_ids:
            return None
        first, second = (f"with {ids}" if ids else "without bos" for ids in (self.prefix_ids, other.prefix_ids))
        return f"texts begin {first}, not {second}"

    def find_renamed(self, other: TokenizerFingerprint) -> str | None:
        """Describe the ids that are different added tokens in this tokenizer and another one. Return None if all common
        ids are equal.

        Ordinary texts do not have these ids, but conversations do.
        """
        renamed = [
            f"{id} is {name!r}, not {other.added_tokens[id]!r}"
            for id, name in self.added_tokens.items()
            if other.added_tokens.get(id, name) != name
        ]
        if not renamed:
            return None
        subject = "the id" if len(renamed) == 1 else f"{len(renamed)} ids of added tokens differ: the id"
        return f"{subject} {', '.join(renamed[:_MAX_NAMED_TOKENS])}" + (", ..." if len(renamed) > _MAX_NAMED_TOKENS else "")


def compute_fingerprint(tokenizer: Tokenizer, config: DataConfig) -> TokenizerFingerprint:
    """Encode the probe texts with a tokenizer, and return its fingerprint.

    Args:
        config: settings of the tokenizer, whose type and file the fingerprint contains.

    Raises:
        ValueError: a library that the tokenizer needs to encode is not installed.
    """
    tokenizer_type = config.tokenizer_type or type(tokenizer).__name__
    paths = [path for name in TOKENIZER_FILE_SETTINGS if (path := getattr(config, name)) is not None]
    file = Path(*Path(paths[0]).parts[-2:]).as_posix() if paths else ""
    probes = None
    if tokenizer_type != "NullTokenizer":
        tokenizer.encode("")  # builds the encoder, and raises an error if a library is missing
        probes = {name: _hash_ids(tokenizer, text) for name, text in PROBE_TEXTS.items()}
    # Special tokens without a row in the embedding of one model have an id in the datasets of this tokenizer nevertheless.
    num_ids = getattr(tokenizer, "num_ids", tokenizer.vocab_size)
    added_tokens = {str(id): name for id, name in getattr(tokenizer, "added_tokens", {}).items() if not _PLACEHOLDER.search(name)}
    return TokenizerFingerprint(
        tokenizer_type, file, num_ids, tokenizer.eod, probes, PROBES_VERSION, added_tokens, [*tokenizer.prefix_ids]
    )


def _hash_ids(tokenizer: Tokenizer, text: str) -> str:
    """Return a hash of the ids of a text, without the ids that the tokenizer puts before and after each text."""
    try:
        ids = tokenizer.encode_segment(text)
    except ValueError:
        return "cannot be encoded"  # for example, a character has no token
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16]


_fingerprints: dict[tuple[object, ...], TokenizerFingerprint] = {}
"""Fingerprints that this process has computed, by the settings and the file times of the tokenizers."""


def get_fingerprint(config: DataConfig, tokenizer: Tokenizer | None = None) -> TokenizerFingerprint:
    """Return the fingerprint of the tokenizer that the settings describe. A process computes it once: building the encoder of a
    large vocabulary takes a second.

    Args:
        tokenizer: the tokenizer if it is already built.

    Raises:
        ValueError: the tokenizer cannot be built, or cannot encode because a library is not installed.
    """
    files = [path for name in TOKENIZER_FILE_SETTINGS if (path := getattr(config, name)) is not None]
    files += [os.path.join(path, "tokenizer.json") for path in files if os.path.isdir(path)]
    times = tuple((stat.st_mtime_ns, stat.st_size) for stat in map(os.stat, filter(os.path.exists, files)))
    key = (config.tokenizer_type, *(getattr(config, name) for name in TOKENIZER_SETTINGS), times)
    if key not in _fingerprints:
        _fingerprints[key] = compute_fingerprint(tokenizer or build_tokenizer(config), config)
    return _fingerprints[key]


def build_config_entry(config: DataConfig, *, is_writer: bool = True) -> dict[str, Any]:
    """Return the entry of config.json with the fingerprint of the tokenizer. It is empty if there is no tokenizer, or if the
    tokenizer cannot encode.

    Args:
        is_writer: whether this rank writes config.json. On other ranks the result is empty, and the encoder is not built.
    """
    if not is_writer or config.tokenizer_type is None:
        return {}
    try:
        return {CONFIG_ENTRY: get_fingerprint(config).to_json()}
    except ValueError:  # training with tokens from files needs no library that encodes
        return {}


def read_config_entry(config_json: Mapping[str, Any], source: str) -> TokenizerFingerprint | None:
    """Return the fingerprint in config.json of a checkpoint; None if it has none.

    Args:
        config_json: content of config.json.
        source: path of config.json, for the error message.

    Raises:
        ValueError: the entry is invalid.
    """
    content = config_json.get(CONFIG_ENTRY)
    return None if content is None else TokenizerFingerprint.from_json(content, f"{CONFIG_ENTRY} in {source}")


# ---- Fingerprints of datasets.


def format_dataset_fingerprint(fingerprint: TokenizerFingerprint) -> str:
    """Return the content of PREFIX.tokenizer."""
    return json.dumps(fingerprint.to_json(), indent=1) + "\n"


def read_dataset_fingerprint(prefix: str) -> TokenizerFingerprint | None:
    """Return the fingerprint of the tokenizer with which a dataset was written; None if the dataset has none.

    Args:
        prefix: path of the dataset without .bin and .idx.

    Raises:
        ValueError: PREFIX.tokenizer is damaged.
    """
    path = get_tokenizer_file(prefix)
    if not Path(path).exists():
        return None
    try:
        content = parse_json(read_regular(path, _MAX_FILE_BYTES))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Copy the file again, or remove it.") from error
    return TokenizerFingerprint.from_json(content, path)


def write_dataset_fingerprint(prefix: str, fingerprint: TokenizerFingerprint, folder: str | None = None) -> None:
    """Write PREFIX.tokenizer of a local dataset. It is written after the dataset, so it is never next to an older dataset.

    Args:
        folder: folder of the file until it is complete, on the same disk; None for the folder of the dataset.
    """
    from megatron.data.indexed_writer import write_atomically

    with write_atomically(get_tokenizer_file(prefix), folder=folder) as (file,):
        file.write(format_dataset_fingerprint(fingerprint).encode())


def merge_fingerprints(prefixes: Sequence[str]) -> tuple[TokenizerFingerprint | None, str | None]:
    """Return the fingerprint of the dataset that joins several datasets. Of compatible tokenizers, it is the one with the most ids.

    Returns:
        the fingerprint, or None if that of a dataset is unknown; and a message for the user in the latter case, and if tokenizers
        differ in an added token or in the ids before each text.

    Raises:
        ValueError: datasets were written with different tokenizers.
    """
    stored = {prefix: read_dataset_fingerprint(prefix) for prefix in prefixes}
    known = {prefix: fingerprint for prefix, fingerprint in stored.items() if fingerprint is not None}
    if not known:
        return None, None
    first_prefix, first = next(iter(known.items()))
    message = None
    for prefix, fingerprint in known.items():
        if not fingerprint.is_comparable(first):
            if (fingerprint.tokenizer_type, fingerprint.num_ids) == (first.tokenizer_type, first.num_ids):
                continue
            return (
                None,
                f"the tokenizers of {first_prefix} and {prefix} cannot be compared, so the result has no fingerprint of one",
            )
        difference = fingerprint.find_difference(first)
        if difference is None and fingerprint.eod != first.eod:
            difference = f"documents end with the id {fingerprint.eod:,}, not {first.eod:,}"
        if (unlike := fingerprint.find_renamed(first) or fingerprint.find_other_prefix(first)) is not None:
            message = f"the tokenizer of {prefix} differs from that of {first_prefix}: {unlike}"
        if difference is not None:
            raise ValueError(
                f"{prefix} was written with another tokenizer than {first_prefix}: {difference}.\n"
                f"  {prefix}: {fingerprint}\n  {first_prefix}: {first}\n"
                "  Preprocess the text of one dataset again, with the tokenizer of the other (tools/preprocess_data.py)."
            )
    if len(known) < len(stored):
        missing = next(prefix for prefix in prefixes if prefix not in known)
        return None, f"{missing} has no fingerprint of its tokenizer, so the result has none"
    return max(known.values(), key=lambda fingerprint: fingerprint.num_ids), message
