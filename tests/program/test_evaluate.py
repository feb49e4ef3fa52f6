"""tools/evaluate.py: perplexity beside a plain computation, and what lm-evaluation-harness is answered."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.data.tokenizer import ByteTokenizer
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.commands import evaluate
from megatron_lab.evaluation.scores import Window, split_windows
from megatron_lab.verification.local_ranks import run_ranks
from megatron_lab.verification.reference.model import compute_logits
from megatron_lab.verification.reference.shape import Weights, build_random_weights
from tests.support.byte_dataset import write_bytes
from tests.support.memory_source import reference_source
from tests.support.reference_runs import llama_like

SHAPE = llama_like(vocab=257, ffn=64)
TEXT = "def größer(a):\n    return a > 0\n\n\nclass Ü: ...\n"
NAMED = ("--tokenizer-type", "ByteTokenizer")
EOD = ByteTokenizer().eod


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Values that float32 holds, so that the files have them exactly."""
    return {name: (3 * weight).float().double() for name, weight in build_random_weights(SHAPE, seed=4).items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Path:
    folder = tmp_path_factory.mktemp("model") / "exported"
    narrow = {name: weight.float() for name, weight in weights.items()}
    export(reference_source(SHAPE, narrow), folder)
    return folder


def nats(weights: Weights, ids: Sequence[int], length: int, stride: int, first: int = 1) -> list[float]:
    """-log(probability) of each token from `first` on, by the plain model. The first window reads `length` tokens, each further one
    ends `stride` later; a token is scored by the first window that has it."""
    found: dict[int, float] = {}
    end = length
    while len(found) < len(ids) - first:
        end = min(end, len(ids) - 1)
        begin = max(0, end - length)
        told = torch.log_softmax(compute_logits(SHAPE, weights, torch.tensor([ids[begin:end]]))[0], -1)
        for place in range(max(begin + 1, first), end + 1):
            found.setdefault(place, -told[place - begin - 1, ids[place]].item())
        end += stride
    return [found[place] for place in sorted(found)]


def told(model: Path, *words: object) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = evaluate.main(
            [str(word) for word in ("--load", model, "--device", "cpu", "--dtype", "float64", "--json", *NAMED, *words)]
        )
    assert code == 0
    found: dict[str, Any] = json.loads(out.getvalue() or "{}")
    return found


def test_perplexity_of_files_is_that_of_the_plain_model_at_every_window_and_layout(
    model: Path, weights: Weights, tmp_path: Path
) -> None:
    text, data = tmp_path / "text.txt", write_bytes(tmp_path / "data")
    text.write_text(TEXT)
    ids = [EOD, *ByteTokenizer().encode(TEXT)]
    for length, stride in ((16, 16), (16, 5), (7, 1), (1000, 1000)):
        expected = nats(weights, ids, length, stride)
        (found,) = told(model, "--files", text, "--window", length, "--stride", stride, "--batch-size", 3).values()
        assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-10)
        assert found["tokens"] == len(ids) - 1 == found["num_bytes"] and found["documents"] == 1
        assert found["byte_perplexity"] == pytest.approx(math.exp(sum(expected) / len(TEXT.encode())), rel=1e-10)
        assert found["bits_per_byte"] == pytest.approx(sum(expected) / len(TEXT.encode()) / math.log(2), rel=1e-10)

    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": part}) + "\n\n" for part in (TEXT, "ü")))
    expected = [one for part in (TEXT, "ü") for one in nats(weights, [EOD, *ByteTokenizer().encode(part)], SHAPE.seq, SHAPE.seq)]
    (found,) = told(model, "--files", lines).values()
    assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-10) and found["documents"] == 2

    # An indexed dataset: the same for each of its documents, whose last token ends them and has no bytes.
    from megatron.data.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(data)
    documents = [dataset.get_document(number).tolist() for number in range(2)]
    expected = [one for ids in documents for one in nats(weights, [EOD, *ids], SHAPE.seq, SHAPE.seq)]
    words = ("--files", data, text, "--max-documents", 2)
    found = told(model, *words)
    assert [*found] == [str(data), str(text)]
    assert found[str(data)]["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-10)
    assert found[str(data)]["num_bytes"] == sum(id != EOD for ids in documents for id in ids) < found[str(data)]["tokens"]

    def on_ranks(rank: int) -> dict[str, Any]:
        return told(model, *words, "--pipeline-model-parallel-size", 2)

    first, *others = run_ranks(4, on_ranks, init=False)
    assert others == [{}, {}, {}]
    for path in found:
        assert first[path]["loss"] == pytest.approx(found[path]["loss"], rel=1e-10)


def test_every_token_is_scored_once_with_as_much_before_it_as_fits() -> None:
    assert [*split_windows(10, 1, 4, 4)] == [Window(0, 1, 5), Window(4, 5, 9), Window(5, 9, 10)]
    assert [*split_windows(12, 9, 4, 4)] == [Window(7, 9, 12)], "a long beginning is cut on its left"
    for total in range(2, 25):
        for first in range(1, total):
            for length, stride in ((4, 4), (5, 2), (3, 1), (40, 40)):
                made = [*split_windows(total, first, length, stride)]
                assert [place for one in made for place in range(one.first_scored, one.end)] == [*range(first, total)]
                for one in made:
                    assert one.end - one.start == min(length + 1, one.end) and one.start < one.first_scored


class Base:
    """What `lm_eval.api.model.LM` gives to those that follow its interface."""

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_the_harness_is_answered_as_the_plain_model_would(model: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its evaluator is played: it gets a model of its own base class, and asks it all that tasks can ask."""
    got: dict[str, Any] = {}
    words = ByteTokenizer()

    def simple_evaluate(lm: Any, *, tasks: list[str], limit: int | None, **_: Any) -> dict[str, Any]:
        assert issubclass(type(lm), Base) and lm._world_size == 1 and (tasks, limit) == (["one"], 3)
        got["pairs"] = lm.loglikelihood([asked("abc ", "def"), asked("", "ab"), asked("x" * 40, "yz")])
        got["rolling"] = lm.loglikelihood_rolling([asked(TEXT)])
        free = {"until": [], "max_gen_toks": 8}
        (got["text"],) = lm.generate_until([asked("a", free)])
        until = got["text"][2]
        got["cut"] = lm.generate_until(
            [asked("a", {"until": [until], "max_gen_toks": 8}), asked("a", {"until": "", "max_gen_toks": 3})]
        )
        return {"results": {"one": {"alias": "one", "acc,none": 0.5}}}

    played: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": Base},
        "lm_eval.tasks": {
            "TaskManager": lambda include_path: SimpleNamespace(match_tasks=lambda names: [n for n in names if n == "one"])
        },
    }
    for name, content in played.items():
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        for attribute, value in content.items():
            setattr(module, attribute, value)
    assert told(model, "--tasks", "one", "--limit", 3) == {"one": {"alias": "one", "acc,none": 0.5}}

    context = words.encode("abc")
    for (total, _), (ids, first) in zip(
        got["pairs"],
        [
            ([*context, *words.encode(" def")], 3),
            ([EOD, *words.encode("ab")], 1),
            (words.encode("x" * 40 + "yz")[-SHAPE.seq - 1 :], SHAPE.seq - 1),
        ],
        strict=True,
    ):
        assert total == pytest.approx(-sum(nats(weights, ids, SHAPE.seq, SHAPE.seq, first)), rel=1e-10)
    ids = [EOD, *words.encode(TEXT)]
    assert got["rolling"] == pytest.approx([-sum(nats(weights, ids, SHAPE.seq, SHAPE.seq))], rel=1e-10)

    made = words.encode("a")
    for _ in range(8):
        made.append(int(compute_logits(SHAPE, weights, torch.tensor([made]))[0, -1].argmax()))
    expected = words.decode(made[1 : made.index(EOD) if EOD in made else None])
    assert (
        got["text"] == expected and got["cut"][0] == expected[: expected.index(expected[2])] and expected.startswith(got["cut"][1])
    )


def test_what_cannot_be_evaluated_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes("größer".encode() + b"\xff")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"txt": "a"}\n')
    for words, code, message in (
        (["--files", tmp_path / "none"], 1, "no text file of this name, and no indexed dataset"),
        (["--files", tmp_path / "bytes"], 1, "byte 0xff at offset 8 is not valid UTF-8"),
        (["--tasks", "t", "--errors", "replace"], 2, "--errors can only be used with --files"),
        (["--files", "x", "--stride", 99, "--window", 9], 1, "--stride 99 must be from 1 to the 9 tokens"),
        (["--files", tmp_path / "x.jsonl"], 1, "x.jsonl:2: the line has no key 'text'"),
        (["--files", "x", "--limit", 2], 2, "--limit can only be used with --tasks"),
        (["--files", "x", "--batch-size", 0], 2, "--batch-size must be at least 1"),
        (["--files", "x", "--context-parallel-size", 2], 2, "use tensor and pipeline ranks"),
        (["--tasks", "t"], 1, "--tasks needs lm-evaluation-harness, which is not installed: pip install"),
    ):
        try:
            found = evaluate.main([str(word) for word in ("--load", model, "--device", "cpu", *NAMED, *words)])
        except SystemExit as error:
            found = int(error.code or 0)
        said = capsys.readouterr()
        assert (found, said.out) == (code, "") and message in said.err
