"""Reader of the files that the package wandb writes offline: records of protobuf in the log format of LevelDB."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _FILE_HEADER = 32 * 1024, 7, 7


def read_offline_runs(folder: Path) -> list[tuple[str, list[dict[str, Any]], int | None]]:
    """The offline runs below `folder/wandb`, oldest first: identifier, rows of the history, and exit code if the run ended."""
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    runs = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        run_id, rows, code = "", [], None
        for data in _read_records(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                run_id = record.run.run_id
            elif record.HasField("history"):
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
            elif record.HasField("exit"):
                code = record.exit.exit_code
        runs.append((run_id, rows, code))
    return runs


def _read_records(data: bytes) -> Iterator[bytes]:
    position, parts = _FILE_HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield parts
            parts = b""
