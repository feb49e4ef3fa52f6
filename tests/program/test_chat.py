"""From conversations to a trained model: the tool's datasets, and runs that learn the answers alone at every layout."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.gpt_dataset import GPTDataset, PackedDataset
from megatron.data.indexed_dataset import IndexedDataset, get_loss_mask_prefix, open_loss_mask
from megatron.data.samples import IN_LOSS
from megatron_lab.commands.inspect_data import main as inspect
from megatron_lab.commands.merge_data import main as merge
from megatron_lab.commands.preprocess_data import main
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_lab.verification.reference.model import Batch, compute_token_losses
from megatron_lab.verification.reference.shape import ReferenceShape, Weights
from tests.support.chats import CHATS, MARKED, PLAIN, write_chats, write_tokenizer
from tests.support.corpora import documents, files_of
from tests.support.equality import number_differences
from tests.support.reference_runs import gpt2_like, train
from tests.support.runs import TINY, arguments, read_metrics, run, saved_tensors

STEPS, SEED = 2, 1234


def _argv(folder: Path, template: str, *more: str) -> list[str]:
    tokenizer = write_tokenizer(folder / "tokenizer", template).parent
    source = write_chats(folder / "chats.jsonl", CHATS * 10)
    words = ["--input", source, "--output-prefix", str(folder / "out"), "--chat-template", "--append-eod", *more]
    return [*words, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, made by the tool."""
    folder = tmp_path_factory.mktemp("chats")
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert main(_argv(folder, MARKED, "--shard-size", "4K")) == 0, told.getvalue()
    assert "are answers, which count in the loss with --data-loss-mask" in told.getvalue()
    return folder


PREFIX = "out_messages_document"


def test_the_tool_writes_conversations_and_marks(folder: Path) -> None:
    """The end of a document is learned where an answer comes before it, and marked as an end in any case."""
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer" / "tokenizer.json")
    prefix = str(folder / PREFIX)
    found, marks = documents(prefix), documents(get_loss_mask_prefix(prefix))
    assert len(found) == len(marks) == 10 * len(CHATS)
    for chat, ids, of_it in zip(CHATS, found, marks, strict=False):
        assert ids[-1] == tokenizer.eod and [mark >> 1 for mark in of_it] == [0] * (len(ids) - 1) + [1]
        answers = [message["content"] for message in chat if message["role"] == "assistant"]  # an empty one adds nothing
        learned = [id for id, mark in zip(ids, of_it, strict=True) if mark & IN_LOSS]
        assert tokenizer.decode(learned) == "".join(answers)
        assert of_it[-1] & IN_LOSS == of_it[-2] & IN_LOSS == 0  # these end with a line's end, which is not generated


def test_parquet_and_templates_without_marks(tmp_path: Path) -> None:
    """Columns of lists give the same; without marks in the template the end is learned behind an answer."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    argv = _argv(tmp_path, PLAIN)
    assert main(argv) == 0
    parquet.write_table(pyarrow.table({"messages": CHATS * 10}), tmp_path / "chats.parquet", row_group_size=9)
    argv[1], argv[3] = str(tmp_path / "chats.parquet"), str(tmp_path / "rows")
    assert main(argv) == 0
    for name in (PREFIX, get_loss_mask_prefix(PREFIX)):
        assert files_of(tmp_path / name) == files_of(tmp_path / name.replace("out", "rows"))
    marks = documents(tmp_path / get_loss_mask_prefix(PREFIX))
    assert [each[-1] & IN_LOSS for each in marks[:4]] == [1, 1, 0, 0]


def test_no_dataset_keeps_the_mask_of_an_earlier_one(folder: Path, tmp_path: Path) -> None:
    """Whichever tool writes over it."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "abc"}\n')
    for number, prefix in enumerate(("a_text_document", "b")):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{get_loss_mask_prefix(prefix)}{suffix}").write_bytes(b"old")
        words = ["--input", str(texts), "--output-prefix", str(tmp_path / "a"), "--tokenizer-type", "ByteTokenizer"]
        joined = ["--input", str(tmp_path / "a_text_document"), "--output-prefix", str(tmp_path / "b")]
        assert (merge(joined) if number else main(words)) == 0
        assert (tmp_path / f"{prefix}.idx").exists() and not list(tmp_path.glob(f"{get_loss_mask_prefix(prefix)}*"))


@pytest.mark.parametrize(
    "change, expected",
    [
        (["--chat-date", "31.1.26"], "2026-01-31"),
        (["--tokenizer-type", "ByteTokenizer"], "HuggingFaceTokenizer"),
        (["--json-keys", "prompt"], "no key 'prompt'"),
    ],
)
def test_wrong_settings_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], expected: str) -> None:
    argv = [*_argv(tmp_path, MARKED), *change]
    try:
        assert main(argv) == 1
    except SystemExit as error:
        assert error.code == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.glob("out*.bin"))


def test_records_that_are_no_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*_argv(tmp_path, MARKED), "--on-error", "skip"]
    bad = ['{"messages": "text"}', '{"messages": []}', '{"messages": [{"content": "x"}]}', '{"messages": [7]}']
    with open(argv[1], "a") as file:
        file.write("\n".join(bad) + "\n")
    assert main(argv) == 0
    told = capsys.readouterr().err
    assert (
        told.count("left out: ") == len(bad) + 2 and told.count("not a list of messages") == told.count("with a field 'role'") == 2
    )


TOOLS = [{"type": "function", "function": {"name": "w", "description": "a", "parameters": {"type": "object"}}}]
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking %}{{ 'T' }}{% endif %}" + PLAIN
)  # no tool calls, no thoughts


def _write_records(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "csv"])
def test_forms_of_records_give_the_same_datasets(tmp_path: Path, file_format: str) -> None:
    """Each by the keys of the first record, and its dataset named by the key of the list."""
    argv = _argv(tmp_path, WITH_TOOLS)
    texts = [("1 + 1", "2"), ("more?", "no")]
    forms: dict[str, list[dict[str, Any]]] = {
        "messages": [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in texts],
        "conversations": [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in texts],
        "alpaca": [{"instruction": a, "input": "", "output": b} for a, b in texts],
        "prompt": [{"prompt": a, "completion": b} for a, b in texts],
    }
    for name, records in forms.items():
        for record, tools in zip(records, (TOOLS, None), strict=True):
            record["tools"] = tools if file_format != "csv" or tools is None else json.dumps(tools)
        path = tmp_path / f"{name}.{file_format}"
        if file_format == "jsonl":
            _write_records(path, records)
        elif file_format == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), path)
        else:
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, records[0])
                writer.writeheader()
                writer.writerows(
                    {key: json.dumps(value) if isinstance(value, list) else value for key, value in record.items()}
                    for record in records
                )
        argv[1], argv[3] = str(path), str(tmp_path / name)
        assert main(argv) == 0
    for suffix in ("_document", get_loss_mask_prefix("_document")):
        wanted = documents(tmp_path / f"messages_messages{suffix}")
        for name in forms:
            key = name if name == "conversations" else "messages"
            assert documents(tmp_path / f"{name}_{key}{suffix}") == wanted
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer/tokenizer.json")
    first, second = (tokenizer.decode(ids) for ids in documents(tmp_path / "messages_messages_document"))
    assert first.startswith(json.dumps(TOOLS)) and "TOOLS" not in second


def test_keys_of_a_prompt_and_an_answer_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = _argv(tmp_path, PLAIN, "--build-index", "--seq-length", "8")
    argv[1] = _write_records(tmp_path / "in.jsonl", [{"prompt": "a", "response": "b", "completion": "c"}] * 9)
    assert main(argv) == 1 and "--json-keys prompt response" in capsys.readouterr().err
    assert main([*argv, "--json-keys", "prompt", "response"]) == 0
    ids = documents(tmp_path / PREFIX)[0]
    assert HuggingFaceTokenizer(tmp_path / "tokenizer/tokenizer.json").decode(ids) == "user\na\nassistant\nb\n"
    argv[1] = _write_records(tmp_path / "in.jsonl", [{"talk": []}])
    assert main(argv) == 1
    assert "no conversation under a known key" in (told := capsys.readouterr().err) and "no key 'messages'" in told


def test_every_record_has_the_form_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = _argv(tmp_path, PLAIN, "--on-error", "skip")
    good = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    others: list[dict[str, Any]] = [
        {"text": "x"},
        good,
        {"messages": []},
        {"conversations": [{"from": "narrator", "value": "a"}]},
        good,
    ]
    argv[1] = _write_records(tmp_path / "in.jsonl", others)
    assert main(argv) == 0
    told = capsys.readouterr().err
    assert "in.jsonl:2: the records are lists of messages under the key 'conversations'" in told
    assert "left out: 0 empty, 3 bad lines" in told and "speaker 'narrator'" in told
    assert len(documents(tmp_path / "out_conversations_document")) == 2


def test_what_the_template_leaves_out_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal and in a file, with the counts of all workers; a later job without such removes the file."""
    argv = _argv(tmp_path, WITH_TOOLS, "--workers", "2", "--shard-size", "1K")
    call = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "b", "reasoning": "c"},
    ]
    record = {"messages": [{"role": "user", "content": "a"}, *answers], "tools": TOOLS, "enable_thinking": True}
    argv[1] = _write_records(tmp_path / "in.jsonl", [record] * 7)
    assert main(argv) == 0
    told, lines = capsys.readouterr().err, (tmp_path / "out_chat_notes.txt").read_text().splitlines()
    assert lines == [
        "reasoning of 7 messages is not rendered by the template",
        "the key 'enable_thinking' of 7 records is not passed to the template (its variables are tools, documents and those in "
        "chat_template_kwargs)",
        "tool_calls of 7 messages is not rendered by the template",
        "7 answers without a text or a tool call that the template renders: not learned, also not the token that ends it",
    ]
    assert all(f"NOTE: {line}\n" in told for line in lines)
    record = {"messages": [{"role": "user", "content": "a"}, answers[1] | {"reasoning": None}]}
    argv[1] = _write_records(tmp_path / "in.jsonl", [record] * 2)
    assert main(argv) == 0
    assert "NOTE" not in capsys.readouterr().err and not (tmp_path / "out_chat_notes.txt").exists()


def test_what_is_learned_is_shown_and_joined(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, tokenizer = str(folder / PREFIX), ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    assert inspect([prefix, "--document", "1", *tokenizer, str(folder / "tokenizer")]) == 0
    assert "of 87 tokens\n    '2'\n    'no\\n\\n\\n'\n" in capsys.readouterr().out
    for number in range(2):
        for name in (PREFIX, get_loss_mask_prefix(PREFIX)):
            for suffix in (".bin", ".idx"):
                (tmp_path / f"{number}_{name}{suffix}").symlink_to(folder / f"{name}{suffix}")
    assert merge(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "all")]) == 0
    for name in ("", get_loss_mask_prefix("")):
        assert documents(tmp_path / f"all{name}") == 2 * documents(f"{prefix}{name}")
    (tmp_path / f"1_{get_loss_mask_prefix(PREFIX)}.idx").unlink()
    assert (
        merge(["--input", str(tmp_path / "0*document"), str(tmp_path / "1*document"), "--output-prefix", str(tmp_path / "b")]) == 1
    )
    assert "has a loss mask, and" in capsys.readouterr().err


# ---- training


def _flags(folder: Path) -> dict[str, Any]:
    return {
        "mock_data": False,
        "data_path": folder / PREFIX,
        "data_loss_mask": True,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": folder / "tokenizer",
        "vocab_size": None,
        "split": "100,0,0",
        "eval_iters": 0,
        "fp64": True,
        "clip_grad": 0.5,
        "weight_decay": 0.1,
        "seed": SEED,
    }


def _batches(prefix: str, vocabulary: int) -> list[Batch]:
    """The batches of a run. What counts is told by the dataset of marks read apart, in the order of the samples."""
    dataset = IndexedDataset(prefix)
    settings: dict[str, Any] = {"split": 0, "seed": SEED, "seq_length": TINY["seq_length"]}
    samples = GPTDataset(dataset, range(dataset.num_documents), **settings, vocab_size=vocabulary)
    marks = open_loss_mask(dataset)
    size, found = TINY["global_batch_size"], []
    for step in range(STEPS):
        windows = torch.from_numpy(samples.get_samples(step * size, size))
        learned = np.zeros(windows.shape, bool)
        for row in range(size):
            pieces = samples.get_lineage(step * size + row)
            taken = [marks.get_document(each.document)[each.first_token : each.first_token + each.num_tokens] for each in pieces]
            learned[row] = np.concatenate(taken) & IN_LOSS
        found.append((windows[:, :-1], windows[:, 1:], torch.from_numpy(learned[:, 1:])))
    return found


def test_runs_learn_the_answers_alone(folder: Path, tmp_path: Path) -> None:
    """Losses and norms are those of the plain model that counts the marked tokens, at every layout."""
    prefix, flags = str(folder / PREFIX), _flags(folder)
    vocabulary = HuggingFaceTokenizer(folder / "tokenizer" / "tokenizer.json").vocab_size
    run(arguments(**flags, train_iters=1, iterations_to_skip=(1,), save=tmp_path))
    rates = [TINY["lr"] * (1 - step / STEPS) for step in range(STEPS)]
    shape = gpt2_like(vocab=vocabulary, ffn=128)
    wanted = train(shape, saved_tensors(tmp_path, 1), _batches(prefix, vocabulary), lr=rates, weight_decay=0.1, clip=0.5)
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"pipeline_model_parallel_size": 2, "num_workers": 0}),
    ]
    for number, (world_size, layout) in enumerate(layouts):
        metrics = tmp_path / f"metrics-{number}"
        run(arguments(**flags, **layout, train_iters=STEPS, metrics_file=metrics), world_size)
        steps = read_metrics(metrics)
        problems = number_differences("losses", [line["lm_loss"] for line in steps], wanted.losses, 1e-10)
        problems += number_differences("norms", [line["grad_norm"] for line in steps], wanted.grad_norms, 1e-10)
        assert not problems, f"{layout}: " + "\n".join(problems)


def _conversations_alone(shape: ReferenceShape, weights: Weights, batch: Any) -> torch.Tensor:
    """The mean loss of learned tokens, each conversation read by itself, with nothing before it."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, learned in batch:
        losses = compute_token_losses(shape, weights, tokens[None, :-1], tokens[None, 1:])[0]
        total, count = total + losses[learned[1:]].sum(), count + int(learned[1:].sum())
    return total / count


def test_whole_conversations_train_as_if_each_were_alone(folder: Path, tmp_path: Path) -> None:
    """Of one sample several: nothing in it depends on the others, at every layout."""
    prefix, length = str(folder / PREFIX), 96
    flags = {**_flags(folder), "whole_documents": True, "reset_attention_mask": True, "reset_position_ids": True}
    flags |= {"seq_length": length, "max_position_embeddings": length, "global_batch_size": 4}
    vocabulary = HuggingFaceTokenizer(folder / "tokenizer" / "tokenizer.json").vocab_size
    said = run(arguments(**flags, train_iters=1, iterations_to_skip=(1,), save=tmp_path))
    assert " steps of 384 tokens\n" in said and said.count(" epochs") == said.count("; epochs 0.00 to ") > 0, "without padding"
    dataset, size = IndexedDataset(prefix), flags["global_batch_size"]
    settings: dict[str, Any] = {"split": 0, "seed": SEED, "seq_length": length, "vocab_size": vocabulary, "eod": 0}
    samples, marks = PackedDataset(dataset, range(dataset.num_documents), **settings), open_loss_mask(dataset)
    batches: list[Any] = []
    for step in range(STEPS):
        pieces = [piece for number in range(step * size, (step + 1) * size) for piece in samples.get_lineage(number)]
        assert len(pieces) > size and all(piece.first_token == 0 for piece in pieces), "several in a sample, all of them whole"
        taken = [(dataset.get_document(piece.document), marks.get_document(piece.document) & IN_LOSS > 0) for piece in pieces]
        batches.append([(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(learned)) for ids, learned in taken])
    rates = [TINY["lr"] * (1 - step / STEPS) for step in range(STEPS)]
    shape = gpt2_like(vocab=vocabulary, ffn=128, seq=length)
    start = saved_tensors(tmp_path, 1)
    wanted = train(shape, start, batches, loss=_conversations_alone, lr=rates, weight_decay=0.1, clip=0.5)
    layouts: list[tuple[int, dict[str, Any]]] = [
        (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"context_parallel_size": 2, "micro_batch_size": 1}),
    ]
    for number, (world_size, layout) in enumerate(layouts):
        metrics = tmp_path / f"metrics-{number}"
        run(arguments(**{**flags, **layout}, train_iters=STEPS, metrics_file=metrics), world_size)
        steps = read_metrics(metrics)
        problems = number_differences("losses", [line["lm_loss"] for line in steps], wanted.losses, 1e-10)
        problems += number_differences("norms", [line["grad_norm"] for line in steps], wanted.grad_norms, 1e-10)
        assert not problems, f"{layout}: " + "\n".join(problems)


def test_a_mask_that_is_not_there_ends_the_run(folder: Path, tmp_path: Path) -> None:
    flags = {**_flags(folder), "data_path": tmp_path / PREFIX}
    for suffix in (".bin", ".idx"):
        (tmp_path / f"{PREFIX}{suffix}").symlink_to(folder / f"{PREFIX}{suffix}")
    with pytest.raises(Exception, match="no dataset of the training split has a loss mask"):
        run(arguments(**flags, train_iters=1))
