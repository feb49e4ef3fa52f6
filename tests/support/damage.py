"""Random damage of files: what disks, interrupted copies, other programs and attackers leave behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import Checksum, Manifest, StoredFile, _parse_tensor
from megatron.checkpoint.storage import MANIFEST

ODD_JSON: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 1 << 62, 1 << 70, 10**400, 0.5, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "../x", "/etc/passwd", "\0", "\ud800", "x" * 5000, "1", "NaN", [], {}, [[]], [None], {"": None}, {"x": [1]}),
    *([0] * 40, [1 << 61] * 3, {str(number): number for number in range(40)}),
)
"""Values of every JSON type, to replace a value of a file with."""
ODD_TEXTS = (
    *(
        "",
        " ",
        "\t",
        "\0",
        "-1",
        "0",
        "1e999",
        "nan",
        "None",
        "null",
        "[",
        "{",
        "]",
        "}",
        ":",
        "- ",
        "#",
        "'",
        '"',
        "&a",
        "*a",
        "!!x",
    ),
    *(
        "\ufeff",
        "\r",
        "\x85",
        "é",
        "x" * 5000,
        "1" * 5000,
        "[" * 300,
        "{a: " * 300,
        "9" * 30,
        "true",
        "<<: *a",
        "!!python/object:x",
    ),
)
"""Texts to put into a line of a file."""


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(max(1, path.stat().st_size)))


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def lengthen(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.choice((1, 8, 4096))))


def flip_bit(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flip_early_bits(path: Path, draw: random.Random) -> None:
    """Where headers are."""
    data = bytearray(path.read_bytes())
    for _ in range(4 if data else 0):
        data[draw.randrange(min(len(data), 64))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def overwrite_block(path: Path, draw: random.Random) -> None:
    """A block of zeros, of ones or of random bytes."""
    data = bytearray(path.read_bytes())
    start, count = draw.randrange(len(data) + 1), draw.choice((4, 8, 512))
    data[start : start + count] = draw.choice((bytes(count), b"\xff" * count, draw.randbytes(count)))
    path.write_bytes(data)


def write_garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((1, 10, 1000))))


def change_text(path: Path, draw: random.Random) -> None:
    """One line is left out, doubled, moved, or has another text in it."""
    lines = path.read_bytes().split(b"\n")
    at = draw.randrange(len(lines))
    action, text = draw.randrange(5), draw.choice(ODD_TEXTS).encode(errors="surrogatepass")
    words = lines[at].split(b" ")
    if action == 0:
        del lines[at]
    elif action == 1:
        lines.insert(at, lines[at])
    elif action == 2:
        lines.insert(draw.randrange(len(lines)), lines.pop(at))
    elif action == 3:
        words[draw.randrange(len(words))] = text
        lines[at] = b" ".join(words)
    else:
        lines.insert(at, text)
    path.write_bytes(b"\n".join(lines))


def change_json(path: Path, draw: random.Random) -> None:
    """One value is replaced by one of another type or size, or one entry is left out, in JSON or in a line of JSON."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.suffix == ".jsonl" else [""]
    at = draw.randrange(len(lines)) if lines else 0
    try:
        content = json.loads(lines[at] if path.suffix == ".jsonl" else path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, IndexError, RecursionError):
        return change_text(path, draw)
    text = json.dumps(_change(content, draw))
    if draw.random() < 0.03:  # deeper than a parser's stack
        text = text[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + text[-1]
    lines[at] = text
    path.write_text("\n".join(lines) + "\n" * (path.suffix == ".jsonl"), encoding="utf-8", errors="surrogatepass")
    return None


def _change(content: Any, draw: random.Random) -> Any:
    if isinstance(content, dict | list) and content and draw.random() < 0.9:
        key = draw.choice(list(content) if isinstance(content, dict) else range(len(content)))
        if draw.random() < 0.1:
            del content[key]
        else:
            content[key] = _change(content[key], draw)
        return content
    if isinstance(content, int | float) and draw.random() < 0.3:
        return draw.choice((content + 1, -content, content * 1000, content / 2 if abs(content) < 1e300 else 0.5))
    return draw.choice(ODD_JSON)


def sign_checkpoint(folder: Path) -> None:
    """Make the checksums and digests in a checkpoint's manifest those of what is there, where what is there has any: as somebody
    does who changes a checkpoint by hand."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        for name, entry in content["files"].items():
            if name.endswith(".json") and (folder / name).is_file():
                data = (folder / name).read_bytes()
                entry |= {"bytes": len(data), "checksum": Checksum(data).text}
        manifest = Manifest(
            {name: _parse_tensor(tensor, name) for name, tensor in content["tensors"].items()},
            {name: StoredFile(file["bytes"], file.get("checksum")) for name, file in content["files"].items()},
        )
        content |= {"digest": manifest.digest, "content_digest": manifest.content_digest}
        path.write_text(json.dumps(content))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        pass


def change_signed_json(path: Path, draw: random.Random) -> None:
    """A change of a checkpoint's JSON that the checksums do not show."""
    change_json(path, draw)
    sign_checkpoint(path.parent)


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def put_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def put_pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def put_socket(path: Path, draw: random.Random) -> None:
    path.unlink()
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)  # the path of a socket has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


def put_device(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("/dev/zero", "/dev/full", "/dev/null")))


def put_link(path: Path, draw: random.Random) -> None:
    """To nothing, or to itself."""
    path.unlink()
    path.symlink_to(draw.choice(("missing", path.name)))


def forbid(path: Path, draw: random.Random) -> None:
    path.chmod(0)


def mix_up(path: Path, draw: random.Random) -> None:
    """Another file of the same folder."""
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    if others:
        shutil.copyfile(draw.choice(sorted(others)), path)


Damage = Callable[[Path, random.Random], None]
CONTENT_CHANGES: tuple[Damage, ...] = (
    *(truncate, lengthen, flip_bit, flip_early_bits, overwrite_block, write_garbage, change_text, mix_up),
)
"""Damage after which the file still has some content."""
REPLACEMENTS: tuple[Damage, ...] = (empty, remove, put_folder, put_pipe, put_socket, put_device, put_link, forbid)
"""Damage after which the content is gone."""


def list_damages(path: Path) -> list[Damage]:
    """The damages that a file can have."""
    damages = [*CONTENT_CHANGES, *REPLACEMENTS]
    if path.suffix in (".json", ".jsonl"):
        damages += [change_json] * 8
    if path.name in (MANIFEST, "state.json", "config.json") and (path.parent / MANIFEST).exists():
        damages += [change_signed_json] * 12
    if path.suffix in (".yaml", ".toml", ".txt", ".sh", ".csv"):
        damages += [change_text] * 8
    return damages
