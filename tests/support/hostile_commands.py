"""A folder with a file of every type that the programs read, and commands that read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from megatron.data.indexed_writer import write_dataset
from megatron.data.tokenizer import ByteTokenizer
from tests.support.byte_dataset import write_bytes
from tests.support.cli import command_words
from tests.support.corpora import write_gz, write_lines, write_parquet
from tests.support.dist_checkpoints import write_dist_example
from tests.support.hostile_runs import Command, run_program
from tests.support.megatron_states import write_legacy_example
from tests.support.runs import TINY
from tests.support.vocabularies import BPE, TEXT, rank_lines, ranked_tokens, tokenizer_json, write_json

TRAIN = "pretrain_gpt"
CHECKPOINT = "megatron_lab.commands.checkpoint"


def _words(**settings: object) -> tuple[str, ...]:
    merged = {name: value for name, value in {**TINY, **settings}.items() if value is not None and value is not False}
    return tuple(command_words(merged))


def _data(**settings: object) -> tuple[str, ...]:
    dataset = {"mock_data": None, "vocab_size": None, "tokenizer_type": "ByteTokenizer", "train_iters": 1}
    return _words(**{**dataset, "metrics_file": "new.jsonl", **settings})


def _tool(name: str) -> str:
    return f"megatron_lab.commands.{name}"


_RESUME = _words(train_iters=4, save="run", load="run", metrics_file="new.jsonl", no_report=None, resume_schedule="new")
_CHECKPOINT_FILES = ("run/iter_*/*", "run/latest_checkpointed_iteration.txt")
_PLAN: dict[str, object] = {"train_iters": 1, "dry_run": True, "world_size": 2}

COMMANDS = (
    Command("resume", TRAIN, _RESUME, (*_CHECKPOINT_FILES, "run/history.jsonl", "run/*"), ("new.jsonl",), is_protected=True),
    Command(
        "start from weights",
        TRAIN,
        _words(train_iters=1, pretrained_checkpoint="run", metrics_file="new.jsonl"),
        _CHECKPOINT_FILES,
        ("new.jsonl",),
        is_protected=True,
    ),
    Command("verify", CHECKPOINT, ("verify", "run"), _CHECKPOINT_FILES, is_protected=True),
    Command("inspect", CHECKPOINT, ("inspect", "run"), ("run/iter_0000002/*.json", "run/latest*")),
    Command("diff", CHECKPOINT, ("diff", "run", "run/iter_0000002"), ("run/iter_0000002/*",), is_protected=True),
    Command(
        "export", CHECKPOINT, ("export", "llama", "exported"), ("llama/iter_*/*",), ("exported/*.safetensors",), is_protected=True
    ),
    Command("import Hugging Face", CHECKPOINT, ("import", "hf", "imported", "--no-tokenizer"), ("hf/*",)),
    Command("import distributed", CHECKPOINT, ("import", "dist", "imported"), ("dist/*", "dist/*/*", "dist/*/.metadata")),
    Command("import legacy", CHECKPOINT, ("import", "legacy", "imported"), ("legacy/*", "legacy/*/*/*")),
    Command("data", TRAIN, _data(data_path="data/text", data_cache_path="cache"), ("data/text.*",)),
    Command("streamed lines", TRAIN, _data(hf_dataset="corpus.jsonl"), ("corpus.jsonl",)),
    Command("streamed rows", TRAIN, _data(hf_dataset="corpus.parquet"), ("corpus.parquet",)),
    Command(
        "tokenizer.json",
        TRAIN,
        _data(data_path="data/text", tokenizer_type="HuggingFaceTokenizer", tokenizer_model="hub"),
        ("hub/*",),
    ),
    Command(
        "merges",
        TRAIN,
        _data(data_path="data/text", tokenizer_type="GPT2BPETokenizer", vocab_file="gpt2/vocab.json", merge_file="gpt2/merges.txt"),
        ("gpt2/*",),
    ),
    Command(
        "tiktoken",
        TRAIN,
        _data(data_path="data/text", tokenizer_type="TikTokenizer", tokenizer_model="ranks.tiktoken"),
        ("ranks.tiktoken",),
    ),
    Command(
        "sentencepiece",
        TRAIN,
        _data(data_path="data/text", tokenizer_type="SentencePieceTokenizer", tokenizer_model="sp.model"),
        ("sp.model",),
    ),
    *(
        Command(
            f"samples {name}", TRAIN, _data(data_path="data/text", sample_interval=1, sample_tokens=1, sample_prompts=name), (name,)
        )
        for name in ("prompts.txt", "prompts.jsonl")
    ),
    Command("YAML", TRAIN, ("--config", "run.yaml"), ("run.yaml",), signs=("--",)),
    Command("TOML", TRAIN, ("--config", "run.toml"), ("run.toml",), signs=("--",)),
    Command("list of datasets", TRAIN, _data(data_args_path="blend.txt"), ("blend.txt",), signs=("dataset",)),
    Command(
        "datasets by split", TRAIN, _data(per_split_data_args_path="splits.json", split=None), ("splits.json",), signs=("dataset",)
    ),
    Command(
        "validation sets",
        TRAIN,
        _data(per_split_data_args_path="sets.json", split=None, full_validation=True, eval_iters=None, skip_train=True),
        ("sets.json", "data/more.*"),
        signs=("dataset",),
    ),
    Command(
        "layer costs",
        TRAIN,
        _words(pipeline_model_parallel_size=2, pipeline_split="balanced", layer_costs="costs.json", **_PLAN),
        ("costs.json",),
    ),
    Command("cluster", TRAIN, _words(**_PLAN, tensor_model_parallel_size=2, plan_cluster="cluster.yaml"), ("cluster.yaml",)),
    Command("search", _tool("plan"), ("--cluster", "cluster.yaml", "--gpus", "2", *_words(train_iters=1)), ("cluster.yaml",)),
    Command(
        "calibrate",
        _tool("check_cluster"),
        ("--calibrate", "plan.json", "--cluster", "cpu", "--output", "new.yaml"),
        ("plan.json",),
    ),
    Command("report", _tool("report"), ("run", "--no-plan"), ("run/history.jsonl",)),
    Command("picture", _tool("plot_loss"), ("run",), ("run/history.jsonl",)),
    Command("inspect data", _tool("inspect_data"), ("data/text", "--verify"), ("data/text.*",)),
    Command("inspect run", _tool("inspect_data"), ("--run", "bytes", "--step", "1"), ("bytes/iter_*/*.json",)),
    Command("inspect record", _tool("inspect_data"), ("--run", "record", "--step", "1"), ("record/run.json",)),
    Command("merge", _tool("merge_data"), ("--input", "data/text", "data/more", "--output-prefix", "merged"), ("data/*",)),
    Command("trace", _tool("verify_layout"), ("--trace", "a.trace", "--trace", "b.trace"), ("*.trace",)),
    Command(
        "evaluate",
        _tool("evaluate"),
        ("--load", "bytes", "--files", "text.txt", "corpus.jsonl", "data/text"),
        ("text.txt", "corpus.jsonl", "data/text.*", "bytes/iter_*/*"),
    ),
    Command(
        "generate",
        _tool("generate_text"),
        ("--load", "bytes", "--prompt-file", "prompt.txt", "--max-new-tokens", "3"),
        ("prompt.txt", "bytes/iter_*/*"),
    ),
    *(
        Command(
            f"preprocess {name}",
            _tool("preprocess_data"),
            ("--input", name, "--output-prefix", "made", "--tokenizer-type", "ByteTokenizer", "--workers", "1", "--append-eod"),
            (name,),
        )
        for name in ("corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet", "corpus.csv", "text.txt")
    ),
    Command(
        "train tokenizer",
        _tool("train_tokenizer"),
        (
            "--input",
            "corpus.jsonl",
            "text.txt",
            "--output",
            "made",
            "--kind",
            "byte-bpe",
            "--vocab-size",
            "270",
            "--json-keys",
            "text",
        ),
        ("corpus.jsonl", "text.txt"),
    ),
    *(
        Command(f"migrate {name}", _tool("migrate"), (name,), (name,), signs=("NOT READY",))
        for name in ("foreign.toml", "foreign.yaml", "foreign.sh")
    ),
    Command(
        "migrate two files",
        _tool("migrate"),
        ("foreign.json", "--with", "foreign.sh", "--world-size", "16", "--", "--no-fp16"),
        ("foreign.json", "foreign.sh"),
        signs=("NOT READY",),
    ),
    Command("reshard", CHECKPOINT, ("reshard", "run", "cut", "--tp", "2"), _CHECKPOINT_FILES, ("cut/iter_*/*",), is_protected=True),
    Command("simulate", _tool("simulate_failures"), ("--gpus", "16", "--step-s", "8", "--days", "2")),
    Command("plot memory", _tool("plot_memory"), _words(train_iters=1)),
    Command("plot schedule", _tool("plot_schedule"), ("--compare", "--stages", "2", "--microbatches", "4")),
)
"""Commands, with the files that each reads. The first line of each is one of the files' formats."""


def write_workspace(folder: Path) -> None:
    """Write a folder with all files that `COMMANDS` read. The checkpoints are those of runs of a few steps."""
    folder.mkdir()
    (folder / "data").mkdir()
    write_bytes(folder / "data" / "text")
    with write_dataset(str(folder / "data" / "more"), np.uint16) as writer:
        writer.add_documents([*range(200), ByteTokenizer().eod] * 5)
    write_lines(folder / "corpus.jsonl")
    texts = [TEXT, "short", "größe"]
    write_gz(folder / "corpus.jsonl.gz", texts)
    write_parquet(folder / "corpus.parquet", texts)
    (folder / "corpus.csv").write_text('id,text\n1,one\n2,"two, and\nmore"\n')
    (folder / "prompt.txt").write_text("a text")
    (folder / "prompts.txt").write_text("a text\\n\nanother\n")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a text"}) + "\n")
    (folder / "text.txt").write_text(TEXT)
    write_json(folder / "hub", tokenizer_json(BPE, "gpt2"))
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "vocab.json").write_text(json.dumps(BPE.vocabulary))
    (folder / "gpt2" / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in BPE.merges))
    (folder / "ranks.tiktoken").write_text(rank_lines(ranked_tokens(BPE)))
    write_dist_example(folder / "dist", 64)
    write_legacy_example(folder / "legacy", 64)
    (folder / "blend.txt").write_text("0.7 data/text 0.3 data/more\n")
    (folder / "splits.json").write_text(json.dumps({"train": ["data/text"], "valid": ["data/more"]}))
    sets = {"one": ["data/more"], "two": [0.3, "data/text", 0.7, "data/more"]}
    (folder / "sets.json").write_text(json.dumps({"train": ["data/text"], "valid": sets}))
    (folder / "costs.json").write_text(json.dumps({"layers": [1.0, 2.0], "embedding": 1.0, "loss": 1.0}))
    root = Path(__file__).parent
    for source in ("llama3_8b.toml", "tiny_llama.yaml", "llama3_8b.sh", "zero3.json"):
        (folder / f"foreign{Path(source).suffix}").write_text((root / "foreign" / source).read_text())
    (folder / "cluster.yaml").write_text((root.parents[1] / "megatron_lab/planner/clusters/cpu.yaml").read_text())
    _make(folder, TRAIN, *_words(train_iters=2, save="run", save_interval=1, no_report=None))
    _make(folder, TRAIN, *_data(data_path="data/text", save="bytes", data_cache_path="cache"))
    llama = {
        "swiglu": True,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    }
    _make(folder, TRAIN, *_words(train_iters=1, save="llama", **llama))
    _make(folder, CHECKPOINT, "export", "llama", "hf")
    (folder / "record").mkdir()
    shutil.copy(folder / "bytes" / "run.json", folder / "record" / "run.json")
    for name in "ab":
        _make(folder, TRAIN, *_words(train_iters=12, save_trace=f"{name}.trace", plan_report="plan.json"))
    _make(
        folder,
        _tool("train_tokenizer"),
        "--input",
        "corpus.jsonl",
        "--output",
        "sp.model",
        "--kind",
        "sentencepiece-bpe",
        "--vocab-size",
        "400",
        "--json-keys",
        "text",
    )
    settings = {
        name.replace("_", "-"): value
        for name, value in {**TINY, "train_iters": 1, "data_path": "data/text"}.items()
        if name not in ("mock_data", "vocab_size", "tokenizer_type")
    } | {"tokenizer-type": "ByteTokenizer"}
    (folder / "run.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items()))
    (folder / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    for path in ("new.jsonl", "exported", "imported"):
        assert not (folder / path).exists() or path == "new.jsonl"
    (folder / "new.jsonl").unlink(missing_ok=True)


def _make(folder: Path, program: str, *argv: str) -> None:
    ended = run_program(Command("make", program, argv), folder, 120.0)
    assert ended.code == 0, f"{program} {argv}\n{ended.output}"
