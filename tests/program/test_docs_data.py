"""Every command of docs/data.md, run in the order of the page in a folder with a little text."""

from __future__ import annotations

import glob
import gzip
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lab.commands import inspect_data, merge_data, plot_data_order, preprocess_data, train_tokenizer
from tests.program.test_readme import commands
from tests.support.chats import CHATS, MARKED, write_chats, write_tokenizer
from tests.support.cli import ROOT
from tests.support.runs import run

TOOLS: dict[str, Callable[[list[str]], int]] = {
    "tools/train_tokenizer.py": train_tokenizer.main,
    "tools/preprocess_data.py": preprocess_data.main,
    "tools/inspect_data.py": inspect_data.main,
    "tools/merge_data.py": merge_data.main,
    "tools/plot_data_order.py": plot_data_order.main,
}
TOKENIZER = "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model"
PLACES = {
    "PREFIX": "data/corpus_text_document",
    "32000": "400",
    "16": "2",
    "1200": "2",
    "38400": "3",
    "4096": "16",
    "lengths.png": "lengths.svg",
}
"""What a page says for a large run, and this test for a small one."""
MODEL = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --position-embedding-type rope
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 1 --device cpu
    --no-loss-picture --no-report"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two compressed files of the project's own documents, and conversations with a tokenizer for them."""
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    (tmp_path / "text").mkdir()
    (tmp_path / "data").mkdir()
    for number in (0, 10):
        with gzip.open(tmp_path / f"text/part-{number:02d}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": f"{number} {part}"}) + "\n" for text in texts for part in text.split("\n\n"))
    (tmp_path / "chats").mkdir()
    write_chats(tmp_path / "chats/part.jsonl", CHATS * 40)
    write_tokenizer(tmp_path / "tokenizer", MARKED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(command: str) -> list[str]:
    """The words after the program, with patterns filled in as a shell does."""
    command = command.replace(" --tokenizer-type ... --tokenizer-model ...", " ...").replace(" --tokenizer-type ...", " ...")
    words: list[str] = []
    for word in shlex.split(command)[1:]:
        found = sorted(glob.glob(word)) if glob.has_magic(word) else []
        words += found or [PLACES.get(word, word)]
    return words


def test_the_page_as_it_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs/data.md").read_text()
    ran = 0
    for command in commands(page):
        if not command.startswith("python ") or "s3://" in command:
            continue
        program, *words = words_of(command)
        if program == "pretrain_gpt.py":
            run([word for each in words for word in (shlex.split(MODEL) if each == "..." else [each])])
        else:
            filled = [word for each in words for word in (shlex.split(TOKENIZER) if each == "..." else [each])]
            assert TOOLS[program](filled) == 0, f"{command}\n{capsys.readouterr().err}"
        ran += 1
    assert ran >= 15
    assert (folder / "lengths.svg").stat().st_size > 0
    shown = capsys.readouterr().out
    assert "step 2: 4 samples, 4 to 7" in shown
