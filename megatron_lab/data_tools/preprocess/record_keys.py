"""Selection of the values of a record by the keys of --json-keys. The key data.text names the value of text in the value of data,
unless the record itself has a key data.text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lab.data_tools.preprocess.errors import BadRecordError

_MISSING = object()
_MESSAGE_FIELDS = {"role", "from"}
"""Fields that tell who speaks: objects with one of them are the messages of a conversation."""
_ADVICE_FOR_STRINGS = """ To read strings as texts, make them objects, such as with: jq -c '.[] | {text: .}' FILE"""


def select_values(record: Any, keys: Sequence[str], unit: str, optional_keys: Sequence[str] = ()) -> list[Any]:
    """Return the value of each key in a record, followed by those of the optional keys.

    Args:
        record: parsed JSON value.
        unit: what the record is in its file, for error messages: "line" or "record".
        optional_keys: keys that the record need not have. Their values are then None.

    Raises:
        BadRecordError: the record is not an object, or has no such key.
    """
    if not isinstance(record, dict):
        raise BadRecordError(
            f'the {unit} is not a JSON object like {{"{[*keys, *optional_keys][0]}": "..."}}. Correct this {unit} of the input'
            + ("." + _ADVICE_FOR_STRINGS if isinstance(record, str) else "")
        )
    values = []
    for key in keys:
        if (value := _find_value(record, key)) is _MISSING:
            raise BadRecordError(
                f"the {unit} has no key {key!r} (--json-keys, --column); the keys of the {unit} are: "
                f"{', '.join(map(repr, [*record][:8])) or 'none'}. Choose a key of the {unit}, or correct the {unit}"
                + _suggest_inner_records(record)
            )
        values.append(value)
    for key in optional_keys:
        value = _find_value(record, key)
        values.append(None if value is _MISSING else value)
    return values


def _find_value(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, which may be nested, in a JSON object; `_MISSING` without such a key."""
    if key in record:
        return record[key]
    for name, inner_key in iter_key_splits(key):
        if isinstance(inner := record.get(name), dict) and (value := _find_value(inner, inner_key)) is not _MISSING:
            return value
    return _MISSING


def iter_key_splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a key before and after each of its dots, from the last dot on: a.b and c, a and b.c."""
    end = len(key)
    while (end := key.rfind(".", 0, end)) > 0:
        yield key[:end], key[end + 1 :]


def _suggest_inner_records(record: Mapping[str, Any]) -> str:
    """Return advice for an object around an array of records. It is empty for other objects, such as a conversation."""
    for name, value in record.items():
        is_list = isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value[:8])
        if is_list and not _MESSAGE_FIELDS & value[0].keys():
            return (
                f". If the records are the {len(value):,} objects under the key {name!r}, write them one per line, such as with: "
                f"jq -c '.[{json.dumps(name)}][]' FILE"
            )
    return ""
