"""Preprocessing against the bare tokenizer, Hugging Face's tokenizers, itself with two workers, and a bound on its memory.

The text is what every Python has: the sources and documents of its library and installed packages. What is compared takes turns.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.data import DataConfig
from megatron.config.launcher import module_start
from megatron_lab.benchmarks.runner import all_in_turns, timed
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob

BARE, LOOP, TWO, MEMORY_MB = 0.85, 3.0, 1.8, 300.0
"""Asked for: at least this share of tiktoken's speed, so many times that of a plain loop of tokenizers and, with two workers, that
of one; and less than so much memory in a process, in MB."""

_VOCAB_SIZE = 50257
_TRAINING_BYTES = 12_000_000
_LOOP_SHARE = 10  # every tenth document, for the slower one


@dataclass(frozen=True)
class Settings:
    """What to measure on."""

    megabytes: float = 60.0
    """Of text."""
    pairs: int = 5
    """Turns of the two that are compared."""
    stream_gb: float = 0.5
    """Size of the jsonl file over which memory is watched."""
    vocab_size: int = _VOCAB_SIZE
    """Of the vocabulary that is trained on a part of the text."""


def texts(megabytes: float) -> list[str]:
    """So many megabytes of text, in mixed order; shuffled lines of the same where there is too little."""
    found: list[str] = []
    left = megabytes * 1e6
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for suffix in ("py", "rst", "md", "txt") for path in library.rglob(f"*.{suffix}"))
    order = random.Random(0)
    order.shuffle(files)
    for text in _read(files):
        found.append(text)
        left -= len(text.encode())
        if left < 0:
            return found
    originals = list(found)
    while left > 0:
        lines = order.choice(originals).splitlines(keepends=True)
        order.shuffle(lines)
        found.append("".join(lines))
        left -= len(found[-1].encode())
    return found


def _read(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield text


def write_corpus(path: Path, documents: Sequence[str]) -> float:
    """JSON lines; returns the megabytes of text in them."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    return sum(len(text.encode()) for text in documents) / 1e6


def show(times: dict[str, list[float]], megabytes: float, bound: float) -> bool:
    """Print the speeds, and how many times the second's the first's is in each pair; returns whether the median keeps the bound."""
    for name, seconds in times.items():
        speeds = [megabytes / each for each in seconds]
        print(f"  {name:34}{statistics.median(speeds):8.1f} MB/s  ({min(speeds):.1f} to {max(speeds):.1f})")
    first, second = times.values()
    ratios = [other / own for own, other in zip(first, second, strict=True)]
    median = statistics.median(ratios)
    held = median >= bound
    print(
        f"  ratio {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), wanted {bound:.2f}{'' if held else '   MISSED'}",
        flush=True,
    )
    return held


def tool(corpus: Path, output: Path, config: DataConfig, workers: int) -> Callable[[], object]:
    """The whole of preprocessing, from the file to the joined dataset."""
    job, engine = PreprocessJob(config, ("text",), append_eod=True), Engine(num_workers=workers)
    return lambda: preprocess([str(corpus)], str(output), job, engine=engine)


def against_tiktoken(folder: Path, config: DataConfig, documents: Sequence[str], pairs: int) -> bool:
    """One worker against tiktoken alone over texts in memory."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = data_gym_to_mergeable_bpe_ranks(config.merge_file or "", config.vocab_file or "")
    bare = tiktoken.Encoding("bare", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
    megabytes = write_corpus(folder / "all.jsonl", documents)

    def loop() -> None:
        for text in documents:
            bare.encode_ordinary(text)

    print(f"one worker against tiktoken alone, {megabytes:.0f} MB in {len(documents):,} documents")
    one = tool(folder / "all.jsonl", folder / "one", config, 1)
    return show(
        all_in_turns({"preprocess_data, 1 worker": timed(one), "tiktoken encode_ordinary": timed(loop)}, pairs), megabytes, BARE
    )


def against_tokenizers(folder: Path, config: DataConfig, documents: Sequence[str], pairs: int) -> bool:
    """One worker against Hugging Face tokenizers in a plain loop over texts in memory."""
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    some = documents[::_LOOP_SHARE]
    megabytes = write_corpus(folder / "some.jsonl", some)

    def loop() -> None:
        for text in some:
            _ = theirs.encode(text).ids

    print(f"one worker against Hugging Face tokenizers in a plain loop, {megabytes:.0f} MB in {len(some):,} documents")
    one = tool(folder / "some.jsonl", folder / "some", config, 1)
    return show(all_in_turns({"preprocess_data, 1 worker": timed(one), "tokenizers encode": timed(loop)}, pairs), megabytes, LOOP)


def two_workers(folder: Path, config: DataConfig, megabytes: float, pairs: int) -> bool:
    """Two workers against one, on one file."""
    print(f"two workers against one, {megabytes:.0f} MB in one file")
    actions = {f"preprocess_data, {n} workers": tool(folder / "all.jsonl", folder / f"by{n}", config, n) for n in (2, 1)}
    return show(all_in_turns({name: timed(action) for name, action in actions.items()}, pairs), megabytes, TWO)


def memory(folder: Path, config: DataConfig, gigabytes: float) -> bool:
    """Peak memory of any process of the tool, with two workers over a jsonl file made of copies of the corpus."""
    stream = folder / "stream.jsonl"
    with stream.open("wb") as file, (folder / "all.jsonl").open("rb") as source:
        while file.tell() < gigabytes * 1e9:
            source.seek(0)
            shutil.copyfileobj(source, file)
    size = stream.stat().st_size / 1e9
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(config.vocab_file), "--merge-file", str(config.merge_file)]
    words = ("preprocess_data", "--input", stream, "--output-prefix", folder / "stream")
    command, environment = module_start("megatron_lab", *words)
    # In a process between: what a child had in common with a large parent would count as its own.
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stderr=subprocess.PIPE, text=True)\n"
        "print(done.stderr.splitlines()[-2], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep='\\n')\n"
        "sys.exit(done.returncode)\n"
    )
    argv = [sys.executable, "-c", code, *command, *flags, "--append-eod", "--workers", "2"]
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told, kilobytes = done.stdout.splitlines()
    peak = int(kilobytes) * 1024 / 1e6
    held = peak < MEMORY_MB
    print(f"peak memory of a process over {size:.1f} GB of jsonl: {peak:.0f} MB, wanted below {MEMORY_MB:.0f}", end="")
    print("" if held else "   MISSED")
    print(f"  {told}", flush=True)
    return held


def run(settings: Settings) -> bool:
    """Print all four; returns whether what is wanted holds.

    Raises:
        ValueError: tokenizers is not installed, which trains the vocabulary.
    """
    from megatron_lab.data_tools.tokenizer_training import train

    documents = texts(settings.megabytes)
    with tempfile.TemporaryDirectory(prefix="bench-preprocessing-") as name:
        folder = Path(name)
        share = max(1, round(settings.megabytes * 1e6 / _TRAINING_BYTES))
        train("byte-bpe", documents[::share], settings.vocab_size, [], folder)
        config = DataConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
        good = [
            against_tiktoken(folder, config, documents, settings.pairs),
            against_tokenizers(folder, config, documents, settings.pairs),
            two_workers(folder, config, sum(len(text.encode()) for text in documents) / 1e6, settings.pairs),
        ]
        room = shutil.disk_usage(folder).free / 1e9
        if room < 3 * settings.stream_gb:
            raise ValueError(
                f"{folder}: {room:.0f} GB are free, {3 * settings.stream_gb:.0f} are needed.\n  Set TMPDIR, or stream less."
            )
        good.append(memory(folder, config, settings.stream_gb))
    return all(good)
