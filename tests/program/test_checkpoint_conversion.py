"""tools/checkpoint.py export and import: from a training run to transformers and back into a run, at other layouts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.data import DataConfig
from megatron.data.indexed_writer import write_dataset
from megatron.data.tokenizer import ByteTokenizer, build_tokenizer
from megatron_lab.checkpoints.model_card import strip_folders
from megatron_lab.commands.checkpoint import main
from megatron_lab.commands.evaluate import main as evaluate
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.open_source import open_source
from megatron_lab.foreign.source import StoredCheckpoint
from megatron_lab.tokenizers.fingerprint import CONFIG_ENTRY, get_fingerprint
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.huggingface_models import logits, opened, saved, some_ids
from tests.support.model_styles import STYLES
from tests.support.runs import arguments, losses, run
from tests.support.vocabularies import BPE, tokenizer_json, write_json

QUIET = {"log_interval": 1, "train_iters": 2}
Texts = pytest.CaptureFixture[str]


def tool(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_json(tmp_path / "tokenizer", {"eos_token": "<|endoftext|>"}, "tokenizer_config.json")
    return write_json(tmp_path / "tokenizer", tokenizer_json(BPE, "qwen2"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers without a tokenizer."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen2")
    saved("qwen2-tied", folder, vocab_size=400, num_key_value_heads=2, num_hidden_layers=4)
    return folder


LAYOUTS = {"gpt2": {"pipeline_model_parallel_size": 2}, "llama": {"tensor_model_parallel_size": 2}}
"""Of the runs that are exported; a test below trains at both."""


@pytest.fixture
def huggingface(tmp_path: Path, tokenizer: Path, qwen2: Path) -> Path:
    """A model of transformers with more rows than its tokenizer has ids, and the tokenizer in its folder."""
    folder = shutil.copytree(qwen2, tmp_path / "model")
    for file in tokenizer.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


GPT2 = pytest.param("gpt2", marks=pytest.mark.full("llama, and tests/proof/test_huggingface_export.py"))


@pytest.mark.parametrize("style", [GPT2 if style == "gpt2" else style for style in STYLES])
def test_a_run_becomes_a_folder_and_the_folder_a_run(style: str, tmp_path: Path, tokenizer: Path, capsys: Texts) -> None:
    """Trained on two ranks, exported on one process, verified, imported, and gone on from in one process."""
    pytest.importorskip("transformers")
    data = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer, "vocab_size": None}
    run(arguments(**QUIET, **STYLES[style], **data, **LAYOUTS[style], save=tmp_path / "run"), 2)
    assert tool("export", tmp_path / "run", tmp_path / "out", "--verify", "--max-shard-size", "20KB") == 0
    told = capsys.readouterr().out
    assert f"as {style};" in told and "Verified: the logits" in told and "gives the same ids" in told
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "Verified: the logits" in readme and 'AutoTokenizer.from_pretrained("out")' in readme
    theirs = opened(tmp_path / "out")
    assert theirs.config.model_type == style and theirs.generation_config.eos_token_id == BPE.vocabulary["<|endoftext|>"]

    assert tool("import", tmp_path / "out", tmp_path / "again", "--verify") == 0
    assert "Verified: the logits" in capsys.readouterr().out
    assert tool("diff", tmp_path / "run", tmp_path / "again") == 0
    assert tool("diff", tmp_path / "run", tmp_path / "out") == 0

    # The first loss from the imported weights is that of the run, had it stopped and begun anew from its own.
    first = []
    for name in ("run", "again"):
        go_on = {"use_checkpoint_args": True, "finetune": True, "load": tmp_path / name, "train_iters": 1}
        kept = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "metrics_file": tmp_path / f"{name}.jsonl"}
        model = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "seq_length"))
        tokens = {"tokenizer_type": None, "vocab_size": None}
        run(arguments(**{**QUIET, **go_on, **kept, **model, **tokens}))
        first.append(losses(tmp_path / f"{name}.jsonl"))
    assert first[0] == first[1] and len(first[0]) == 1


def test_an_imported_model_is_trained_on_at_any_layout_with_all_its_rows(huggingface: Path, tmp_path: Path) -> None:
    """400 rows for 348 ids. One step too short to change a weight: what is saved is what was imported."""
    assert tool("import", huggingface, tmp_path / "base") == 0
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()  # the copy in the checkpoint's folder is taken
    go_on = {
        "use_checkpoint_args": True,
        "pretrained_checkpoint": tmp_path / "base",
        "seq_length": 16,
        "lr": 1e-30,
        "train_iters": 1,
    }
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "weight_decay": 0.0}
    model = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "tokenizer_type", "vocab_size"))
    run(arguments(**{**go_on, **layout, **model, "save": tmp_path / "on"}), 4)
    assert tool("diff", huggingface, tmp_path / "on") == 0
    assert open_source(tmp_path / "on").vocab_size == 400
    assert tool("export", tmp_path / "on", tmp_path / "out", "--verify") == 0
    ids = some_ids(400)
    assert torch.equal(logits(opened(tmp_path / "out"), ids), logits(opened(huggingface), ids))


def test_what_an_import_writes(huggingface: Path, tmp_path: Path, capsys: Texts) -> None:
    assert tool("import", huggingface, tmp_path / "base") == 0
    told = capsys.readouterr().out
    assert "400 rows, the tokenizer 348 ids" in told and f"--pretrained-checkpoint {tmp_path / 'base'}" in told
    record = json.loads((tmp_path / "base" / "iter_0000000" / "config.json").read_text())
    data = record["config"]["data"]
    assert record["vocab_size"] == data["vocab_size"] == 400 and record["config"]["model"]["add_qkv_bias"] is True
    assert data["tokenizer_model"] == str(tmp_path / "base" / "tokenizer" / "tokenizer.json")
    assert (tmp_path / "base" / "tokenizer" / "tokenizer_config.json").exists()
    copied = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=data["tokenizer_model"])
    assert record[CONFIG_ENTRY] == get_fingerprint(copied).to_json()
    stored = open_source(tmp_path / "base")
    assert isinstance(stored, StoredCheckpoint) and stored.state == {"has_optimizer": False}
    assert {info.dtype for info in stored.weights.values()} == {torch.float32}


def spoil(folder: Path, change: Callable[[Any], Any]) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_verify_stops_an_import_of_what_is_computed_otherwise(huggingface: Path, tmp_path: Path, capsys: Texts) -> None:
    """transformers is given another base of the rotary frequencies than we read."""
    pytest.importorskip("transformers")
    source = HuggingFaceFolder(huggingface)
    spoil(
        huggingface,
        lambda c: c["rope_parameters"].update(rope_theta=700.0) if "rope_parameters" in c else c.update(rope_theta=700.0),
    )
    from megatron_lab.checkpoints.against_transformers import compare_logits

    with pytest.raises(ValueError, match="more than the allowed 0.0001: the conversion is wrong"):
        compare_logits(source, huggingface, torch.float64)


def test_verify_stops_where_transformers_finds_tensors_left_over(huggingface: Path, qwen2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from megatron_lab.checkpoints.against_transformers import compare_logits

    other = shutil.copytree(qwen2, tmp_path / "other")
    compare_logits(HuggingFaceFolder(huggingface), other, torch.float32)
    tensors = load_file(other / "model.safetensors") | {"model.layers.0.extra.weight": torch.ones(3)}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"transformers reports .*model.layers.0.extra.weight"):
        compare_logits(HuggingFaceFolder(huggingface), other, torch.float32)


def test_verify_stops_an_export_and_nothing_is_left(
    huggingface: Path, tmp_path: Path, capsys: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_lab.checkpoints import huggingface_writer

    right = huggingface_writer._build_config
    monkeypatch.setattr(huggingface_writer, "_build_config", lambda *given: right(*given) | {"rms_norm_eps": 0.1})
    assert tool("export", huggingface, tmp_path / "out", "--verify") == 1
    assert "the conversion is wrong" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_tokenizer_that_transformers_reads_otherwise_is_told_and_stops_verify(
    huggingface: Path, tmp_path: Path, capsys: Texts
) -> None:
    """transformers 5 takes every tokenizer of a qwen2 model for Qwen's."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    assert tool("export", huggingface, tmp_path / "first") == 0
    assert "PreTrainedTokenizerFast" not in capsys.readouterr().out
    write_json(huggingface, tokenizer_json(BPE, "gpt2"))
    assert tool("export", huggingface, tmp_path / "out") == 0
    assert "open it with PreTrainedTokenizerFast" in capsys.readouterr().out
    text = "1 cat's  mat, 12 and 345"
    ids = open_source(huggingface).tokenizer
    assert ids is not None
    assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")(text)["input_ids"] == build_tokenizer(ids).encode(
        text
    )
    assert tool("export", huggingface, tmp_path / "verified", "--verify") == 1
    assert "gives other token ids in transformers" in capsys.readouterr().err and not (tmp_path / "verified").exists()


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A model whose tokenizer has an added special token that its embedding has no row for, as Gemma 3 has."""
    pytest.importorskip("transformers")
    saved("llama", tmp_path / "short", vocab_size=348)
    document = tokenizer_json(BPE, "gpt2")
    document["added_tokens"].append({**document["added_tokens"][0], "content": "<image>", "id": 348})
    write_json(tmp_path / "short", document)
    write_json(tmp_path / "short", {"eos_token": "<|endoftext|>"}, "tokenizer_config.json")
    return tmp_path / "short"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), {}),
        (("--no-tokenizer",), {"tokenizer_model": "short"}),
        (("--no-tokenizer",), {"tokenizer_model": "short", "vocab_size": 348}),
    ],
)
def test_a_special_token_without_a_row(
    short: Path, tmp_path: Path, capsys: Texts, flags: tuple[str, ...], told: dict[str, Any]
) -> None:
    """Import, training, evaluation and export take the model and name the token. The rows are those of the checkpoint."""
    note = "the tokenizer has 349 ids, the word embedding 348 rows: no row for <image> (348)"
    assert tool("import", short, tmp_path / "base", "--verify", *flags) == 0
    assert (note in capsys.readouterr().out) == (not flags)
    model = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "tokenizer_type", "vocab_size"))
    if told:
        told = {**told, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": short}
    start = {"use_checkpoint_args": True, "pretrained_checkpoint": tmp_path / "base", "seq_length": 16, "save": tmp_path / "run"}
    log = run(arguments(**{**QUIET, **model, **start, **told}))
    assert note in log and "vocabulary 348" in log
    assert tool("export", tmp_path / "run", tmp_path / "out", "--verify") == 0
    assert note in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 348
    assert evaluate(["--load", str(tmp_path / "out"), "--files", str(Path(__file__))]) == 0
    assert note in capsys.readouterr().err
    with write_dataset(str(tmp_path / "bad"), np.uint16) as writer:
        writer.add_documents(np.array([1, 2, 3, 348], np.uint16), [2, 2])
    assert evaluate(["--load", str(tmp_path / "out"), "--files", str(tmp_path / "bad")]) == 1
    assert "bad: text 1 (the first is 0) has the token id 348" in capsys.readouterr().err


def test_an_ordinary_token_without_a_row_is_of_another_model(short: Path, tmp_path: Path, capsys: Texts) -> None:
    write_json(short, {"<more>": 349}, "added_tokens.json")
    assert tool("import", short, tmp_path / "base") == 1
    assert "the tokenizer has 350 ids, but" in (text := capsys.readouterr().err) and "belongs to another model" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "{hf}", "{full}"], "exists already"),
        (["import", "{hf}", "{full}"], "exists already"),
        (["export", "{hf}", "{new}", "--family", "gpt2"], "--position-embedding-type is rope, there learned_absolute"),
        (
            ["export", "{hf}", "{new}", "--family", "bert"],
            "bert is not a supported architecture of transformers. Choose one of gpt2",
        ),
        (["export", "{nothing}", "{new}"], "no such folder"),
        (["import", "{hf}", "{new}", "--embedding-rows", "5"], "--embedding-rows has no effect"),
        (["export", "{hf}", "{new}", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"], "belongs to another model"),
        (["import", "{hf}", "{new}", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"], "belongs to another model"),
        (["import", "{hf}", "{new}", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"], "NullTokenizer has 101 ids"),
        (["export", "{hf}", "{new}", "--vocab-file", "x"], "--vocab-file does not belong"),
        (["export", "{hf}", "{new}", "--tokenizer-model", "{nothing}"], "there is no such file or folder"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_written(
    words: list[str], said: str, huggingface: Path, tmp_path: Path, capsys: Texts
) -> None:
    full, new = tmp_path / "full", tmp_path / "new"
    full.mkdir()
    (full / "mine").write_text("")
    named = {"hf": huggingface, "full": full, "new": new, "nothing": tmp_path / "nothing"}
    assert tool(*(word.format(**named) for word in words)) == 1
    assert said in capsys.readouterr().err
    assert not new.exists() and [path.name for path in full.iterdir()] == ["mine"]


def test_without_a_tokenizer(tmp_path: Path, capsys: Texts) -> None:
    pytest.importorskip("transformers")
    saved("llama", tmp_path / "model", vocab_size=64)
    assert tool("export", tmp_path / "model", tmp_path / "out") == 1
    assert "has no known tokenizer" in capsys.readouterr().err
    assert tool("export", tmp_path / "model", tmp_path / "out", "--no-tokenizer", "--verify") == 0
    assert tool("import", tmp_path / "model", tmp_path / "base", "--no-tokenizer") == 0
    assert not (tmp_path / "base" / "tokenizer").exists() and not (tmp_path / "out" / "tokenizer.json").exists()
    assert tool("diff", tmp_path / "model", tmp_path / "base") == 0
    assert tool("import", tmp_path / "model", tmp_path / "ids", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63") == 0
    assert open_source(tmp_path / "ids").tokenizer.vocab_size == 63  # type: ignore[union-attr]


def test_a_run_on_numbers_is_exported_without_a_tokenizer(tmp_path: Path, capsys: Texts) -> None:
    pytest.importorskip("transformers")
    run(arguments(**QUIET, save=tmp_path / "run"))
    assert tool("export", tmp_path / "run", tmp_path / "out", "--verify") == 0
    assert "no tokenizer is written" in capsys.readouterr().out and opened(tmp_path / "out").generation_config.eos_token_id == 60
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_a_failed_import_leaves_no_checkpoint(huggingface: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = HuggingFaceFolder.read

    def fail(self: HuggingFaceFolder, name: str, box: Any = None) -> torch.Tensor:
        if name == "final_norm.weight":
            raise OSError("the disk is gone")
        return read(self, name, box)

    monkeypatch.setattr(HuggingFaceFolder, "read", fail)
    assert tool("import", huggingface, tmp_path / "base") == 1
    assert not list((tmp_path / "base").rglob("*.json"))
    monkeypatch.undo()
    assert tool("import", huggingface, tmp_path / "base") == 0


@pytest.mark.parametrize("size", ["0", "5TB", "-1", "x"])
def test_sizes_of_files(size: str, capsys: Texts) -> None:
    with pytest.raises(SystemExit):
        tool("export", "a", "b", f"--max-shard-size={size}")
    assert "not a size. Set a number of bytes, such as 500MB" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "import"])
def test_only_local_folders_are_written(command: str, capsys: Texts) -> None:
    with pytest.raises(SystemExit):
        tool(command, "a", "s3://bucket/b")
    assert "Write to a local folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "import"])
def test_help_needs_neither_torch_nor_numpy(command: str) -> None:
    code = (
        "import sys; sys.argv = ['checkpoint.py', sys.argv[1], '--help']\n"
        "import runpy\n"
        "try: runpy.run_path('tools/checkpoint.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, command], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--verify" in done.stdout, done.stderr


def test_a_model_card_tells_data_and_training_and_no_folder_and_what_comes_next_works(tmp_path: Path, capsys: Texts) -> None:
    """Two datasets at 3 to 1, and then one of them alone."""
    pytest.importorskip("transformers")
    places = [Path(write_bytes(tmp_path / "books")), tmp_path / "code"]
    with write_dataset(str(places[1]), np.uint16) as writer:
        for number in range(40):
            writer.add_documents([*range(number, number + 60), ByteTokenizer().eod])
    common: dict[str, Any] = {**FLAGS, **STYLES["llama"], "log_interval": 1, "seed": 77, "save": tmp_path / "run"}
    common["metrics_file"] = tmp_path / "run" / "numbers.jsonl"
    run(arguments(**{**common, "data_path": [3, places[0], 1, places[1]], "train_iters": 2}))
    run(
        arguments(
            **{**common, "data_path": places[1], "train_iters": 3, "load": tmp_path / "run", "override_opt_param_scheduler": True}
        )
    )
    out = tmp_path / "a model"
    assert tool("export", tmp_path / "run", out, "--license", "mit", "--dtype", "bfloat16") == 0
    card = (out / "README.md").read_text()
    state = StoredCheckpoint(tmp_path / "run" / "iter_0000003").state["progress"]
    settings = StoredCheckpoint(tmp_path / "run" / "iter_0000003").settings
    tokens = state["consumed_samples"] * settings.model.seq_length
    assert "\nlicense: mit\n" in card and f"The run read {tokens:,} tokens in 3 iterations:" in card
    blended = state["phases"][1]["first_sample"] * settings.model.seq_length
    prints = [part["fingerprint"] for phase in state["phases"] for part in phase["parts"]]
    assert (
        f"| {places[0].name} | about {blended * 0.75:,.0f} |" in card
        and f"| {places[1].name} | about {tokens - blended * 0.75:,.0f} |" in card
        and all(one in card for one in prints)
    )
    last = losses(tmp_path / "run" / "numbers.jsonl")[-1]
    assert (
        f"| training | {last:.4f} | 3 |" in card
        and "| seed | 77 |" in card
        and f"| learning rate | {settings.optimizer.lr:g} to" in card
    )
    for file in out.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name

    told = capsys.readouterr().out
    following = told.partition("next:\n")[2]
    steps = dict(re.findall(r"^  ([^:\n]+):\s+(.+(?:(?<=\\)\n.+)*)$", following, re.MULTILINE))
    assert '  transformers:\n    python -c "from transformers import pipeline; \\\n' in following
    assert f"\n      model = pipeline('text-generation', '{out}'); \\\n" in following
    assert [*steps] == ["transformers", "vLLM", "GGUF, in llama.cpp", "upload"]
    assert shlex.split(steps["vLLM"]) == ["vllm", "serve", str(out)]
    assert shlex.split(steps["upload"]) == ["hf", "upload", "a model", str(out)]
    assert shlex.split(steps["GGUF, in llama.cpp"])[-1] == f"{out}.gguf"
    python, flag, code = shlex.split(steps["transformers"].replace("\\\n", ""))  # as a shell does between double quotes
    assert (python, flag) == ("python", "-c")
    exec(code, {})
    assert "generated_text" in capsys.readouterr().out


def test_paths_in_notes_lose_their_folders() -> None:
    text = "/home/me/runs/a is damaged; took ~/b/iter_1, '../c/d' and (/x). 16/32 and/or https://a.b/c stay"
    assert strip_folders(text) == "a is damaged; took iter_1, 'd' and (x). 16/32 and/or https://a.b/c stay"
