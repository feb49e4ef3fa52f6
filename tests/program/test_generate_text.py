"""tools/generate_text.py: from any folder of weights, at any layout; what it prints and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.make_corpus import write_corpus
from megatron.data.tokenizer import ByteTokenizer
from megatron_lab.commands import checkpoint, generate_text
from megatron_lab.verification.local_ranks import run_ranks
from megatron_lab.verification.reference.model import compute_logits
from megatron_lab.verification.reference.shape import ReferenceShape, Weights, build_random_weights
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.cli import ROOT
from tests.support.legacy_checkpoints import LegacyLayout, write_legacy
from tests.support.model_styles import STYLES
from tests.support.reference_runs import llama_like
from tests.support.runs import arguments, run, saved_tensors
from tests.support.vocabularies import sentencepiece
from tests.support.warm_python import warm_python

SHAPE = llama_like(vocab=257, ffn=64)
PROMPT = "text = 'ü"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --save folder of a short run on bytes at TP 2, which learned to predict later tokens too."""
    folder = tmp_path_factory.mktemp("run")
    data = {**FLAGS, **STYLES["llama"], "data_path": write_bytes(folder / "text"), "train_iters": 6, "save": folder / "save"}
    data["mtp_num_layers"] = 1
    run(arguments(**data, tensor_model_parallel_size=2), 2)
    return folder / "save"


def greedy(shape: ReferenceShape, weights: Weights, prompt: str, count: int) -> list[int]:
    """What the plain model goes on with, up to the end of a document."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    start = len(ids)
    weights = {name: weight.double() for name, weight in weights.items()}
    for _ in range(count):
        ids.append(int(compute_logits(shape, weights, torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == tokenizer.eod:
            return ids[start:-1]
    return ids[start:]


Say = Callable[..., str]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Call the tool, which must succeed, and give what it printed."""

    def call(*words: object) -> str:
        code = generate_text.main([str(word) for word in words])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call


def test_greedy_text_of_a_run(trained: Path, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    expected = greedy(SHAPE, saved_tensors(trained, 6), PROMPT, 20)
    flags = ("--load", trained, "--temperature", 0, "--max-new-tokens", 20, "--dtype", "float64")
    assert say(*flags, "--prompt", PROMPT) == PROMPT + ByteTokenizer().decode(expected) + "\n"
    (found,) = map(json.loads, say(*flags, "--prompt", PROMPT, "--json").splitlines())
    assert found == {
        "prompt": PROMPT,
        "sample": 0,
        "text": ByteTokenizer().decode(expected),
        "tokens": expected,
        "ended": len(expected) < 20,
    }
    (found,) = map(json.loads, say(*flags, "--prompt", "", "--json").splitlines())
    assert found["tokens"] == greedy(SHAPE, saved_tensors(trained, 6), "", 20)


def test_prompt_from_a_file_and_from_stdin(trained: Path, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--load", trained, "--temperature", 0, "--max-new-tokens", 6)
    expected = say(*flags, "--prompt", PROMPT)
    (tmp_path / "prompt").write_text(PROMPT + "\n")
    assert say(*flags, "--prompt-file", tmp_path / "prompt") == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode())))
    assert say(*flags) == expected


def test_several_texts_follow_from_the_seed(trained: Path, say: Say) -> None:
    flags = ("--load", trained, "--max-new-tokens", 12, "--top-k", 50, "--top-p", 0.9, "--prompt", "def ", "x", PROMPT)
    out = say(*flags, "--num-samples", 2)
    headings = [line for line in out.splitlines() if line.startswith("== ")]
    assert headings == [f"== prompt {prompt}, sample {sample}" for prompt in (1, 2, 3) for sample in (1, 2)]
    assert out.startswith("== prompt 1, sample 1\ndef ")
    assert say(*flags, "--num-samples", 2, "--batch-size", 1) == out == say(*flags, "--num-samples", 2, "--seed", 1234)
    assert say(*flags, "--num-samples", 2, "--seed", 5) != out
    lines = [json.loads(line) for line in say(*flags, "--num-samples", 2, "--json").splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [(p, s) for p in ("def ", "x", PROMPT) for s in (0, 1)]
    assert out == "".join(
        f"== prompt {i // 2 + 1}, sample {line['sample'] + 1}\n{line['prompt']}{line['text']}\n\n" for i, line in enumerate(lines)
    )


LAYOUTS = pytest.mark.full("tests/proof/test_inference_generate.py")


@pytest.mark.parametrize(
    "flag",
    [
        pytest.param(None, marks=LAYOUTS),
        "--pipeline-model-parallel-size",
        pytest.param("--context-parallel-size", marks=LAYOUTS),
    ],
    ids=["tp2", "pp2", "cp2"],
)
def test_the_same_text_on_two_processes(trained: Path, say: Say, flag: str | None) -> None:
    words = ["--load", str(trained), "--max-new-tokens", "12", "--prompt", PROMPT, "abc", "--dtype", "float64", "--device", "cpu"]
    expected = say(*words)

    def rank_prints(rank: int) -> tuple[int, str]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            return generate_text.main([*words, *([] if flag is None else [flag, "2"])]), out.getvalue()

    assert run_ranks(2, rank_prints, init=False) == [(0, expected), (0, "")]


def test_a_legacy_checkpoint_and_a_hugging_face_folder(tmp_path: Path, say: Say) -> None:
    """The same weights in each: the same text."""
    weights = {name: weight.float() for name, weight in build_random_weights(SHAPE, seed=4).items()}
    legacy, model = tmp_path / "legacy", tmp_path / "model"
    write_legacy(legacy, SHAPE, weights, LegacyLayout(2, 2), tokenizer_type="ByteTokenizer")
    flags = ("--temperature", 0, "--max-new-tokens", 16, "--prompt", PROMPT, "--json", "--ignore-eod")
    found = json.loads(say("--load", legacy, *flags))
    assert found["tokens"] and max(found["tokens"]) < 257, "padding is never chosen"
    assert checkpoint.main(["export", str(legacy), str(model), "--no-tokenizer"]) == 0
    assert json.loads(say("--load", model, "--tokenizer-type", "ByteTokenizer", *flags).splitlines()[-1]) == found


def test_characters_come_whole_and_at_once(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written piece by piece are whole characters; on a terminal, none that steers it."""
    pieces: list[str] = []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert (
        generate_text.main(
            ["--load", str(trained), "--prompt", "a\x1b[2J\tb\u00a0ü", "--max-new-tokens", "5", "--temperature", "9"]
        )
        == 0
    )
    assert pieces[0] == "a\ufffd[2J\tb\u00a0ü" and pieces[-1] == "\n" and 2 < len(pieces)


REFUSED: dict[str, tuple[list[str], int, str]] = {
    "temperature": (["--temperature", "-1"], 1, "--temperature must be 0"),
    "greedy with a seed": (["--temperature", "0", "--seed", "3"], 2, "--seed has no effect with --temperature 0"),
    "greedy samples": (["--temperature", "0", "--num-samples", "3"], 2, "all samples of a prompt are the same"),
    "no tokens": (["--max-new-tokens", "0"], 2, "--max-new-tokens must be at least 1"),
    "more processes": (["--tensor-model-parallel-size", "2"], 2, "needs 2 processes, and 1 is started"),
    "tokenizer's setting alone": (["--vocab-size", "60"], 2, "--vocab-size has no effect without --tokenizer-type"),
    "bos": (["--add-bos"], 1, "this tokenizer has no bos"),
    "other tokenizer": (["--tokenizer-type", "NullTokenizer", "--vocab-size", "60"], 1, "is not an id"),
    "larger tokenizer": (
        ["--tokenizer-type", "NullTokenizer", "--vocab-size", "600", "--prompt", "300"],
        1,
        "the tokenizer has 601 ids, but",
    ),
    "step": (["--ckpt-step", "7"], 1, "7"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(trained: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    words, code, message = REFUSED[what]
    prompt = [] if "--prompt" in words else ["--prompt", PROMPT]
    try:
        found = generate_text.main(["--load", str(trained), *prompt, *words])
    except SystemExit as error:
        found = int(error.code or 0)
    captured = capsys.readouterr()
    assert (found, captured.out) == (code, "") and message in captured.err


def test_folders_and_files_that_are_not_there(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_text.main(["--load", str(tmp_path / "nowhere"), "--prompt", "a"]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert generate_text.main(["--load", str(trained), "--prompt-file", str(tmp_path / "prompt")]) == 1
    assert "prompt" in capsys.readouterr().err
    (tmp_path / "prompt").write_bytes(b"\xff")
    assert generate_text.main(["--load", str(trained), "--prompt-file", str(tmp_path / "prompt")]) == 1
    assert "is not UTF-8" in capsys.readouterr().err


def test_learned_positions_bound_the_text(tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    run(arguments(train_iters=1, save=tmp_path, max_position_embeddings=20))
    (found,) = map(json.loads, say("--load", tmp_path, "--prompt", "1 2 3", "--ignore-eod", "--json").splitlines())
    assert len(found["tokens"]) == 17 and found["text"] == "".join(f" {id}" for id in found["tokens"] if id < 60)
    assert generate_text.main(["--load", str(tmp_path), "--prompt", "1 2 3", "--max-new-tokens", "18"]) == 1
    assert "exceed the 20 positions" in capsys.readouterr().err


def test_tokenizer_files_that_lie_elsewhere_now(tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(ROOT / "megatron_lab/inference", tmp_path / "corpus.jsonl")
    first, now = tmp_path / "first.model", tmp_path / "now.model"
    sentencepiece(tmp_path / "corpus.jsonl", first, 400)
    settings = {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": first, "vocab_size": None}
    run(arguments(**settings, train_iters=1, save=tmp_path / "run"))
    flags = ("--load", tmp_path / "run", "--prompt", "def", "--max-new-tokens", 5)
    capsys.readouterr()  # what was said of the vocabulary
    expected = say(*flags)
    first.rename(now)
    assert generate_text.main([str(word) for word in flags]) == 1
    assert str(first) in capsys.readouterr().err
    assert say(*flags, "--tokenizer-model", now) == expected


def test_a_reader_that_leaves_early(trained: Path) -> None:
    words = [warm_python(), "tools/generate_text.py", "--load", str(trained), "--prompt", "a", "b", "c", "--max-new-tokens", "50"]
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    process.stdout.close()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Traceback" not in told and b"BrokenPipe" not in told


def test_help_is_quick() -> None:
    code = (
        "import sys\nfrom tools import generate_text\ntry:\n    generate_text.main(['--help'])\n"
        "finally:\n    assert not {'torch', 'numpy'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--top-p" in done.stdout, done.stderr
