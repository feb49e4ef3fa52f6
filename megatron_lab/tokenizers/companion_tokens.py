"""Tokens that the files next to a tokenizer.json add to it. They get the ids that AutoTokenizer of transformers 5 gives them.

transformers reads the files in this order (`PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` of version
5.24): the entry `added_tokens_decoder` of tokenizer_config.json; without this entry, added_tokens.json instead, and
special_tokens_map.json, whose values replace those of tokenizer_config.json. Then follow the special tokens that have a name, such
as `eos_token`, and those of the list `extra_special_tokens` (before version 5: `additional_special_tokens`).

A token that tokenizer.json does not have gets the next free id. transformers ignores the id that a file states for such a token.
This module refuses files that state another id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lab.tokenizers.bpe_rules import read_json
from megatron_lab.tokenizers.file_names import ADDED_TOKENS, SPECIAL_TOKENS_MAP, TOKEN_OPTIONS, TOKENIZER_CONFIG

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens, in the order in which transformers adds them (`SPECIAL_TOKENS_ATTRIBUTES`)."""
_MAX_NAMED_TOKENS = 5


@dataclass(frozen=True)
class CompanionToken:
    """Token that a file next to tokenizer.json names."""

    content: str
    """Text of the token."""
    options: dict[str, bool]
    """Value of each option of `TOKEN_OPTIONS`: how the token is matched in a text, and whether it is special."""
    file: Path
    id: int | None = None
    """Id that the file states; None if it states none."""
    replaces_options: bool = False
    """Whether the options replace those that tokenizer.json has for the same token."""
    has_name: bool = False
    """Whether the token has a name, such as `eos_token`. A token with a name is special when it is added."""

    def get_added_options(self) -> dict[str, bool]:
        """Return the options with which the token is added."""
        return self.options | {"special": self.options["special"] or self.has_name}


@dataclass
class CompanionTokens:
    """Tokens that the files next to a tokenizer.json name, in the order in which transformers adds them."""

    tokens: list[CompanionToken] = field(default_factory=list)
    unread: list[CompanionToken] = field(default_factory=list)
    """Tokens of added_tokens.json that transformers does not read, because tokenizer_config.json has `added_tokens_decoder`."""


@dataclass(frozen=True)
class CompletedTokens:
    """Added tokens of a tokenizer.json together with those of the files next to it."""

    entries: tuple[dict[str, Any], ...]
    """Value of `added_tokens` for the completed tokenizer.json."""
    is_changed: bool
    """Whether the entries differ from those of tokenizer.json."""
    marked_ids: frozenset[int]
    """Ids of tokens that the model of tokenizer.json has, and that only another file calls special."""
    notes: tuple[str, ...]
    """Lines for the user: which tokens the other files add."""


def read_companion_tokens(path: Path) -> CompanionTokens:
    """Read the tokens that the files next to a tokenizer.json name.

    Args:
        path: path of tokenizer.json.

    Raises:
        ValueError: a file is damaged, or an entry has another form than transformers writes.
    """
    config_file, map_file, added_file = (path.parent / name for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS))
    config, special_map, added = map(_read_object, (config_file, map_file, added_file))
    values: dict[str, tuple[Any, Path]] = {name: (value, config_file) for name, value in config.items()}
    extras = [values.pop("extra_special_tokens")] if "extra_special_tokens" in values else []
    if not any(value for value, _ in extras) and "additional_special_tokens" in values:
        extras = [values.pop("additional_special_tokens")]
    if "added_tokens_decoder" not in config:
        if "extra_special_tokens" in special_map:
            extras.append((special_map.pop("extra_special_tokens"), map_file))
        values |= {name: (value, map_file) for name, value in special_map.items()}
    named = _list_named(values, extras)
    listed = [token for value, file in extras if isinstance(value, list) for token in _list_tokens(value, file)]
    stated_added = _list_stated(added, added_file)
    result = CompanionTokens()
    if "added_tokens_decoder" in config:
        stated = [
            _build_token(value, config_file, f"added_tokens_decoder.{id}", id=id)
            for id, value in _sort_by_id(config["added_tokens_decoder"], config_file)
        ]
        result.unread = [_as_stated(token, is_special=False) for token in stated_added]
    else:
        special = {token.content for token in (*(token for role, token in named if role in _ROLES), *listed)}
        stated = [_as_stated(token, is_special=token.content in special) for token in stated_added]
    if "additional_special_tokens" in values and all(isinstance(value, dict) for value, _ in extras):
        listed += _list_tokens(*values["additional_special_tokens"])
    names = {token.content for _, token in named}
    stated = [dataclasses.replace(token, has_name=token.content in names) for token in stated]
    result.tokens = [*stated, *(token for _, token in named), *listed]
    return result


def complete_added_tokens(
    path: Path, entries: Iterable[Mapping[str, Any]], vocab: Mapping[str, int], companions: CompanionTokens
) -> CompletedTokens:
    """Add the tokens of the other files to the added tokens of a tokenizer.json.

    Args:
        path: path of tokenizer.json.
        entries: value of `added_tokens` in tokenizer.json.
        vocab: ids of the tokens of the model of tokenizer.json.
        companions: tokens of the other files.

    Raises:
        ValueError: the files state two ids for a token, or the same id for two tokens.
    """
    completed = {str(entry["content"]): dict(entry) for entry in entries}
    ids = {**vocab, **{content: int(entry["id"]) for content, entry in completed.items()}}
    token_of_id = {id: content for content, id in ids.items()}
    origins: dict[str, Path] = {}
    new: dict[Path, list[str]] = {}
    is_changed, marked = False, set()
    for token in companions.tokens:
        if not token.content:
            continue
        id = ids.get(token.content)
        if id is None:
            id = _find_next_id(completed.values(), len(vocab))
            _check_free(token, id, token_of_id, origins, path)
            ids[token.content], token_of_id[id], origins[token.content] = id, token.content, token.file
            new.setdefault(token.file, []).append(f"{token.content} ({id})")
        elif token.id is not None and token.id != id:
            raise _conflict(
                f"{token.file} states the id {token.id} for the token {token.content!r}, but in "
                f"{origins.get(token.content, path)} its id is {id}"
            )
        entry = completed.get(token.content)
        options = token.get_added_options()
        if entry is None:
            completed[token.content] = {"id": id, "content": token.content, **options}
            if options["special"] and token.content in vocab:
                marked.add(id)
        elif token.replaces_options and _get_options(entry) != token.options:
            entry |= options
        else:
            continue
        is_changed = True
    notes = [f"{file.name} adds {format_names(names)} to {path.name}" for file, names in new.items()]
    if unread := list(_find_unread(companions.unread, ids, token_of_id, origins, path)):
        notes.append(
            f"{format_names(unread)} of {ADDED_TOKENS} left out, as in transformers: {TOKENIZER_CONFIG} has added_tokens_decoder"
        )
    return CompletedTokens(tuple(completed.values()), is_changed, frozenset(marked), tuple(notes))


def get_token_content(value: Any) -> Any:
    """Return the text of a special token in tokenizer_config.json or special_tokens_map.json, which may be an object with the
    options of the token. Values of other types are returned unchanged."""
    return value.get("content") if isinstance(value, dict) else value


def list_name_files(folder: Path) -> tuple[str, str]:
    """Return the names of the two files that name special tokens, the one first whose names transformers prefers."""
    has_decoder = "added_tokens_decoder" in _read_object(folder / TOKENIZER_CONFIG)
    return (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP) if has_decoder else (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG)


def asks_for_bos(path: Path) -> bool:
    """Return whether the tokenizer_config.json next to a tokenizer.json has `add_bos_token`, which transformers 5 ignores."""
    return _read_object(path.parent / TOKENIZER_CONFIG).get("add_bos_token") is True


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file, or another value in it."""
    content = read_json(file, str(file), "a JSON object") if file.is_file() else None
    return content if isinstance(content, dict) else {}


def _list_named(values: Mapping[str, tuple[Any, Path]], extras: Iterable[tuple[Any, Path]]) -> list[tuple[str, CompanionToken]]:
    """Return the name and the token of each special token that has a name: the names of `_ROLES`, then the other names that end in
    `_token` (first those whose value has options, as in transformers), then those of the objects in `extras`."""
    others = [
        name
        for name, (value, file) in values.items()
        if name.endswith("_token")
        and name not in _ROLES
        and (isinstance(value, str) or (isinstance(value, dict) and ("__type" in value or file.name == SPECIAL_TOKENS_MAP)))
    ]
    others.sort(key=lambda name: isinstance(values[name][0], str) and values[name][1].name == TOKENIZER_CONFIG)
    items = [(name, *values[name]) for name in (*_ROLES, *others) if name in values]
    items += [(name, value, file) for extra, file in extras if isinstance(extra, dict) for name, value in extra.items()]
    return [
        (name, _build_token(value, file, name, has_name=True))
        for name, value, file in items
        if isinstance(get_token_content(value), str)
    ]


def _list_tokens(values: Any, file: Path) -> list[CompanionToken]:
    """Return the tokens of a list of special tokens, each a text or an object with a text and options."""
    return [
        _build_token(value, file, f"extra_special_tokens, entry {i}")
        for i, value in enumerate(values if isinstance(values, list) else [])
    ]


def _list_stated(added: Mapping[str, Any], file: Path) -> list[CompanionToken]:
    """Return the tokens of added_tokens.json, ordered by id. Their options are not known yet."""
    if invalid := [name for name, id in added.items() if type(id) is not int or id < 0]:
        raise ValueError(
            f"{file}: the id of {invalid[0]!r} must be a whole number, not {added[invalid[0]]!r}.\n  Correct the file."
        )
    return [CompanionToken(name, {}, file, id) for name, id in sorted(added.items(), key=lambda item: item[1])]


def _as_stated(token: CompanionToken, *, is_special: bool) -> CompanionToken:
    """Return a token of added_tokens.json with the options that transformers gives it."""
    options = dict.fromkeys(TOKEN_OPTIONS, False) | {"normalized": not is_special, "special": is_special}
    return CompanionToken(token.content, options, token.file, token.id)


def _sort_by_id(decoder: Any, file: Path) -> list[tuple[int, Any]]:
    """Return the ids and the tokens of `added_tokens_decoder`, ordered by id."""
    try:
        return sorted(((int(id), value) for id, value in decoder.items()), key=lambda item: item[0])
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"{file}: added_tokens_decoder must be an object that gives each id its token: {error}.\n  Correct the file."
        ) from error


def _build_token(value: Any, file: Path, key: str, *, id: int | None = None, has_name: bool = False) -> CompanionToken:
    """Build a token from a text, which makes it special, or from an object with a text and options.

    Args:
        key: place of the value in the file, for the error message.
        id: id that the file states. A text without an id is a special token.
        has_name: whether the token has a name, such as `eos_token`.

    Raises:
        ValueError: the value has another form.
    """
    content = get_token_content(value)
    if not isinstance(content, str):
        raise ValueError(
            f"{file}, {key}: {str(value)[:60]} is not a token (a text, or an object with content).\n  Correct the file."
        )
    stated = value if isinstance(value, dict) else {}
    is_special = bool(stated.get("special", has_name or not isinstance(value, dict)))
    options = {name: bool(stated.get(name)) for name in TOKEN_OPTIONS} | {"special": is_special}
    options["normalized"] = bool(stated.get("normalized", not is_special))
    return CompanionToken(content, options, file, id, replaces_options=id is not None, has_name=has_name)


def _get_options(entry: Mapping[str, Any]) -> dict[str, bool]:
    return {name: bool(entry.get(name)) for name in TOKEN_OPTIONS}


def _find_next_id(entries: Iterable[Mapping[str, Any]], num_model_tokens: int) -> int:
    """Return the id that the tokenizers library gives to the next added token (`AddedVocabulary::add_tokens`)."""
    return max(num_model_tokens, max((int(entry["id"]) + 1 for entry in entries), default=0))


def _check_free(token: CompanionToken, id: int, token_of_id: Mapping[int, str], origins: Mapping[str, Path], path: Path) -> None:
    """Check that the id of a new token is the one that its file states, and that no other token has it.

    Raises:
        ValueError: it is not.
    """
    for stated in (token.id, id):
        if (owner := token_of_id.get(-1 if stated is None else stated)) is not None:
            raise _conflict(
                f"{token.file} gives the token {token.content!r} the id {stated}, which in {origins.get(owner, path)} belongs to "
                f"{owner!r}"
            )
    if token.id not in (None, id):
        raise _conflict(
            f"{token.file} states the id {token.id} for the token {token.content!r}, but the next id after the tokens of {path} "
            f"is {id}, which transformers gives it"
        )


def _find_unread(
    tokens: Iterable[CompanionToken],
    ids: Mapping[str, int],
    token_of_id: Mapping[int, str],
    origins: Mapping[str, Path],
    path: Path,
) -> Iterator[str]:
    """Yield the texts of the tokens of added_tokens.json that no other file has.

    Raises:
        ValueError: another file gives one of the tokens another id, or its id to another token.
    """
    for token in tokens:
        owner = token_of_id.get(-1 if token.id is None else token.id)
        known_id = ids.get(token.content)
        if known_id is not None and known_id != token.id:
            raise _conflict(
                f"{token.file} states the id {token.id} for the token {token.content!r}, but in "
                f"{origins.get(token.content, path)} its id is {known_id}"
            )
        if known_id is None and owner is not None:
            raise _conflict(
                f"{token.file} gives the token {token.content!r} the id {token.id}, which in {origins.get(owner, path)} belongs to "
                f"{owner!r}"
            )
        if known_id is None:
            yield token.content


def _conflict(problem: str) -> ValueError:
    return ValueError(f"{problem}.\n  Correct one of the two files, or copy both again from the same tokenizer.")


def format_names(names: list[str]) -> str:
    """Return the first names of a list of tokens for a message, with the number of tokens if there are more."""
    shown = ", ".join(names[:_MAX_NAMED_TOKENS])
    return f"{shown} and {len(names) - _MAX_NAMED_TOKENS:,} more tokens" if len(names) > _MAX_NAMED_TOKENS else shown
