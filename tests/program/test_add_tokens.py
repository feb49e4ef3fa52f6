"""tools/checkpoint.py import --add-tokens: new tokens in the tokenizer, and rows for them, as transformers adds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lab.checkpoints.added_tokens import read_new_tokens
from megatron_lab.commands.checkpoint import main
from megatron_lab.foreign.open_source import open_source
from tests.support.huggingface_models import opened, saved
from tests.support.runs import arguments, losses, run
from tests.support.vocabularies import BPE, tokenizer_json, write_json

END = BPE.vocabulary["<|endoftext|>"]
NUM_IDS = END + 2
TOKENS = ["<|tool|>", {"content": "<|turn|>", "special": True}, "größer"]
TEXTS = ("the cat<|tool|>hat <|tool|> größer größ", "<|tool|><|tool|>", "no new one, größe")
TEMPLATE = "{% for message in messages %}{{ '<|tool|>' + message['content'] + '<|turn|>' }}{% endfor %}"
Texts = pytest.CaptureFixture[str]


def tool(*words: object) -> int:
    return main([str(word) for word in words])


def write_model(folder: Path, num_rows: int, *, tied: bool) -> Path:
    saved("llama", folder, vocab_size=num_rows, num_hidden_layers=2, tie_word_embeddings=tied)
    write_json(folder, tokenizer_json(BPE, "gpt2"))
    write_json(folder, {"eos_token": "<|endoftext|>", "added_tokens_decoder": {}}, "tokenizer_config.json")
    return folder


def write_tokens(folder: Path, tokens: list[Any]) -> Path:
    return write_json(folder, tokens, "tokens.json")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_export_equals_the_extension_by_transformers(tied: bool, tmp_path: Path, capsys: Texts) -> None:
    """Ids, rows, logits; a chat template that writes the new tokens; and two steps of training with them."""
    transformers = pytest.importorskip("transformers")
    model = write_model(tmp_path / "model", NUM_IDS, tied=tied)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    words = ("--add-tokens", write_tokens(tmp_path, TOKENS), "--verify")
    assert tool("import", model, tmp_path / "base", *words) == 0
    told = capsys.readouterr().out
    assert f"adds 3 tokens, id {NUM_IDS} to {NUM_IDS + 2}, with 0 old rows" in told and "3 new rows, the mean" in told
    assert tool("export", tmp_path / "base", tmp_path / "out", "--verify") == 0

    theirs = opened(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens("<|tool|>")
    tokenizer.add_tokens("<|turn|>", special_tokens=True)
    tokenizer.add_tokens("größer")
    old_rows = theirs.get_input_embeddings().weight.detach().clone()
    theirs.resize_token_embeddings(len(tokenizer), mean_resizing=True)
    ours, our_tokenizer = opened(tmp_path / "out"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(our_tokenizer) == len(tokenizer) == NUM_IDS + 3 == ours.config.vocab_size
    for text in (*TEXTS, "the<|turn|>cat"):
        assert our_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"], text
    assert our_tokenizer.decode([NUM_IDS + 1, NUM_IDS], skip_special_tokens=True) == "<|tool|>"
    rows = ours.get_input_embeddings().weight.detach()
    assert torch.equal(rows[:NUM_IDS], old_rows)
    torch.testing.assert_close(rows[NUM_IDS:], old_rows.double().mean(0).float().expand(3, -1), rtol=0, atol=0)
    ids = torch.tensor([our_tokenizer(TEXTS[2])["input_ids"]])
    with torch.no_grad():
        old_logits, new_logits = opened(model)(ids).logits, ours(ids).logits
        torch.testing.assert_close(new_logits[..., :NUM_IDS], old_logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(new_logits[..., NUM_IDS:], old_logits.mean(-1, keepdim=True).expand(1, -1, 3), rtol=0, atol=1e-5)
        new_ids = torch.tensor([our_tokenizer(TEXTS[0])["input_ids"]])
        torch.testing.assert_close(ours(new_ids).logits, theirs.eval()(new_ids).logits, rtol=0, atol=2e-3)  # theirs add noise
    chat_ids = our_tokenizer.apply_chat_template([{"role": "user", "content": "cat"}], return_dict=False)
    assert chat_ids[0] == NUM_IDS and chat_ids[-1] == NUM_IDS + 1

    model_flags = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "tokenizer_type", "vocab_size"))
    source = {"use_checkpoint_args": True, "pretrained_checkpoint": tmp_path / "base", "save": tmp_path / "run"}
    run(arguments(**model_flags, **source, train_iters=2, lr=1e-3, metrics_file=tmp_path / "log.jsonl", seq_length=16))
    assert len(losses(tmp_path / "log.jsonl")) == 2
    assert open_source(tmp_path / "run").vocab_size == NUM_IDS + 3


def test_unused_rows_are_taken_first(tmp_path: Path, capsys: Texts) -> None:
    model = write_model(tmp_path / "model", NUM_IDS + 2, tied=True)
    old = opened(model).get_input_embeddings().weight.detach()
    assert tool("import", model, tmp_path / "base", "--add-tokens", write_tokens(tmp_path, TOKENS)) == 0
    assert "with 2 old rows of the embedding, which keep their values, and 1 new row, the mean" in capsys.readouterr().out
    rows = open_source(tmp_path / "base").read("embedding.word.weight")
    assert torch.equal(rows[:-1], old) and torch.allclose(rows[-1], old.mean(0)) and len(rows) == NUM_IDS + 3
    record = json.loads((tmp_path / "base/iter_0000000/config.json").read_text())
    assert record["vocab_size"] == NUM_IDS + 3 and record["config"]["data"]["vocab_size"] is None

    many = write_model(tmp_path / "many", NUM_IDS + 50, tied=True)
    assert tool("import", many, tmp_path / "other", "--add-tokens", write_tokens(tmp_path, TOKENS)) == 0
    assert "with 3 old rows of the embedding, which keep their values, and 0 new rows, the mean" in capsys.readouterr().out
    assert open_source(tmp_path / "other").vocab_size == NUM_IDS + 50
    config = json.loads((tmp_path / "other/tokenizer/tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"][str(NUM_IDS + 1)]["content"] == "<|turn|>"


def test_tokens_that_exist_are_left_out(tmp_path: Path, capsys: Texts) -> None:
    model = write_model(tmp_path / "model", NUM_IDS, tied=True)
    file = tmp_path / "tokens.txt"
    file.write_text("<think>\n\n<|tool|>\n", encoding="utf-8")
    assert tool("import", model, tmp_path / "base", "--add-tokens", file) == 0
    told = capsys.readouterr().out
    assert f"'<think>' of --add-tokens is left out: the tokenizer has it already, with the id {END + 1}" in told
    assert f"adds 1 token, id {NUM_IDS}, with 0 old rows of the embedding" in told


@pytest.mark.parametrize(
    ("name", "num_rows", "vocab_size"), [("<image>", NUM_IDS + 1, NUM_IDS + 1), ("<audio>", NUM_IDS + 2, None)]
)
def test_a_token_without_a_row_gets_one(tmp_path: Path, capsys: Texts, name: str, num_rows: int, vocab_size: int | None) -> None:
    """The tokenizer has two ids more than the embedding has rows."""
    model = write_model(tmp_path / "model", NUM_IDS, tied=True)
    names = ["<image>", "<audio>"]
    write_json(model, {"eos_token": "<|endoftext|>", "extra_special_tokens": names}, "tokenizer_config.json")
    assert tool("import", model, tmp_path / "base", "--add-tokens", write_tokens(tmp_path, [name])) == 0
    id = NUM_IDS + names.index(name)
    assert f"{name!r} of --add-tokens is left out: the tokenizer has it already, with the id {id}; it gets a row in" in (
        capsys.readouterr().out
    )
    rows = open_source(tmp_path / "base").read("embedding.word.weight")
    assert len(rows) == num_rows and torch.allclose(rows[NUM_IDS:], rows[:NUM_IDS].mean(0))
    record = json.loads((tmp_path / "base/iter_0000000/config.json").read_text())
    assert record["vocab_size"] == num_rows and record["config"]["data"]["vocab_size"] == vocab_size


def test_adapters_of_a_model_with_new_rows_need_a_base_with_them(tmp_path: Path, capsys: Texts) -> None:
    pytest.importorskip("peft")
    model = write_model(tmp_path / "models--org--name" / "snapshots" / "abc", NUM_IDS, tied=True)
    cache = model.parents[1]
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    assert tool("import", cache, tmp_path / "base", "--add-tokens", write_tokens(tmp_path, TOKENS)) == 0
    model_flags = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "tokenizer_type", "vocab_size"))
    source = {"use_checkpoint_args": True, "pretrained_checkpoint": tmp_path / "base", "save": tmp_path / "run"}
    run(arguments(**model_flags, **source, train_iters=1, lr=1e-3, seq_length=16, lora_rank=2))
    assert tool("export", tmp_path / "base", tmp_path / "extended") == 0
    capsys.readouterr()
    flags = ("--format", "peft", "--verify", "--peft-base")
    reason = f"has {NUM_IDS} rows in its embedding, but the run has {NUM_IDS + 3}"
    assert tool("export", tmp_path / "run", tmp_path / "no", *flags, cache) == 1
    assert f"--peft-base {model} {reason}" in capsys.readouterr().err and not (tmp_path / "no").exists()
    assert tool("export", tmp_path / "run", tmp_path / "adapters", *flags, tmp_path / "extended") == 0
    told = capsys.readouterr().out
    assert "note: " not in told and f"The base model is {tmp_path / 'extended'}" in told
    assert tool("export", tmp_path / "run", tmp_path / "unnamed", "--format", "peft") == 0
    assert f"note: the imported model {reason}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "contains no token"),
        ("a\nb\na\n", "line 3: the file has the token 'a' twice"),
        ('["a", {"special": true}]', "item 1: {'special': True} is not a token"),
        ('[{"content": "a", "special": "yes"}]', "item 0: special = 'yes' is not an option"),
        ('[{"content": "a", "colour": true}]', "item 0: colour = True is not an option"),
        ('["a"', "is not a valid JSON list"),
    ],
)
def test_files_that_are_not_valid(content: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(ValueError, match=reason):
        read_new_tokens(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_new_tokens(tmp_path / "none")


def test_what_cannot_be_extended_is_refused_and_nothing_is_written(tmp_path: Path, capsys: Texts) -> None:
    model = write_model(tmp_path / "model", NUM_IDS, tied=True)
    tokens = write_tokens(tmp_path, TOKENS)
    content = tokenizer_json(BPE, "gpt2")
    content["added_tokens"][-1]["id"] += 5
    write_json(tmp_path / "holes", content)
    write_json(tmp_path / "holes", {"eos_token": "<|endoftext|>"}, "tokenizer_config.json")
    bytes_model = write_model(tmp_path / "bytes", 257, tied=True)
    wide = write_model(tmp_path / "wide", NUM_IDS + 9, tied=True)
    for source, flags, reason in (
        (model, ["--no-tokenizer"], "--no-tokenizer leaves it out"),
        (bytes_model, ["--tokenizer-type", "ByteTokenizer"], "is a ByteTokenizer"),
        (wide, ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "holes"], "are not consecutive"),
        (model, ["--add-tokens", tmp_path / "none"], "cannot be read"),
    ):
        assert tool("import", source, tmp_path / "base", "--add-tokens", tokens, *flags) == 1
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "base").exists()
