"""Benchmark of preprocessing: its speed compared with tokenizer libraries, its speed with two workers, and its peak memory.

The text is available with every Python installation: sources and documents of the standard library and of installed packages. The
two sides of each comparison are measured alternately.
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
from megatron.config.launcher import build_module_command
from megatron_lab.benchmarks.runner import make_timer, run_in_turns
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob

MIN_TIKTOKEN_RATIO, MIN_TOKENIZERS_RATIO, MIN_TWO_WORKER_RATIO, MAX_MEMORY_MB = 0.85, 3.0, 1.8, 300.0
"""Bounds: minimum speed relative to tiktoken, minimum speed relative to a plain loop over Hugging Face tokenizers, minimum speed of
two workers relative to one, and maximum memory of a process in MB."""

_VOCAB_SIZE = 50257
_TRAINING_BYTES = 12_000_000
_DOCUMENT_STRIDE = 10  # the tokenizers library is slow, so that comparison uses every tenth document


@dataclass(frozen=True)
class Settings:
    """Sizes of the texts, the vocabulary and the input file, and number of repetitions."""

    megabytes: float = 60.0
    """Size in MB of the text for the speed comparisons."""
    pairs: int = 5
    """Number of repetitions of each comparison. A repetition measures both sides of the comparison."""
    stream_gb: float = 0.5
    """Size in GB of the jsonl file with which the peak memory is measured."""
    vocab_size: int = _VOCAB_SIZE
    """Size of the byte-level BPE vocabulary, which is trained on a part of the text."""


def collect_texts(megabytes: float) -> list[str]:
    """Return about `megabytes` MB of text: the contents of files of the Python installation, in random order.

    If the files have too little text, the list also contains copies of the same texts with shuffled lines.
    """
    collected: list[str] = []
    remaining_bytes = megabytes * 1e6
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for suffix in ("py", "rst", "md", "txt") for path in library.rglob(f"*.{suffix}"))
    rng = random.Random(0)
    rng.shuffle(paths)
    for text in _read_texts(paths):
        collected.append(text)
        remaining_bytes -= len(text.encode())
        if remaining_bytes < 0:
            return collected
    originals = list(collected)
    while remaining_bytes > 0:
        lines = rng.choice(originals).splitlines(keepends=True)
        rng.shuffle(lines)
        collected.append("".join(lines))
        remaining_bytes -= len(collected[-1].encode())
    return collected


def _read_texts(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield text


def write_corpus(path: Path, documents: Sequence[str]) -> float:
    """Write the documents as JSON lines with the key "text". Return the size of their text in MB."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    return sum(len(text.encode()) for text in documents) / 1e6


def print_speeds(times: dict[str, list[float]], megabytes: float, bound: float) -> bool:
    """Print the speeds of two programs, and the ratio of the first speed to the second.

    Args:
        times: seconds of each repetition by the name of the program; two programs.
        megabytes: MB of text that a program processes in each repetition.
        bound: minimum ratio.

    Returns:
        Whether the median ratio reaches `bound`.
    """
    for name, durations in times.items():
        speeds = [megabytes / duration for duration in durations]
        print(f"  {name:34}{statistics.median(speeds):8.1f} MB/s  ({min(speeds):.1f} to {max(speeds):.1f})")
    first, second = times.values()
    ratios = [second_time / first_time for first_time, second_time in zip(first, second, strict=True)]
    median = statistics.median(ratios)
    is_met = median >= bound
    print(
        f"  ratio {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), minimum {bound:.2f}{'' if is_met else '   MISSED'}",
        flush=True,
    )
    return is_met


def build_preprocess_action(corpus: Path, output: Path, config: DataConfig, num_workers: int) -> Callable[[], object]:
    """Build a function that preprocesses a corpus completely: it reads the input file and writes the final dataset.

    Args:
        corpus: jsonl file to read.
        output: path of the dataset's files, without the suffixes .bin and .idx.
        config: settings of the tokenizer.
    """
    job, engine = PreprocessJob(config, ("text",), append_eod=True), Engine(num_workers=num_workers)
    return lambda: preprocess([str(corpus)], str(output), job, engine=engine)


def compare_with_tiktoken(folder: Path, config: DataConfig, documents: Sequence[str], pairs: int) -> bool:
    """Compare the speed of preprocessing by one worker with that of tiktoken, which only tokenizes texts in memory.

    Args:
        folder: folder into which the input file and the datasets are written.
        config: settings of the tokenizer.
        documents: texts to process.
        pairs: number of repetitions; each measures both programs.

    Returns:
        Whether preprocessing reaches `MIN_TIKTOKEN_RATIO` times the speed of tiktoken.
    """
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = data_gym_to_mergeable_bpe_ranks(config.merge_file or "", config.vocab_file or "")
    encoding = tiktoken.Encoding("bare", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
    megabytes = write_corpus(folder / "all.jsonl", documents)

    def encode_all() -> None:
        for text in documents:
            encoding.encode_ordinary(text)

    print(f"one worker compared with only tokenizing by tiktoken, {megabytes:.0f} MB in {len(documents):,} documents")
    single_worker = build_preprocess_action(folder / "all.jsonl", folder / "one", config, 1)
    return print_speeds(
        run_in_turns(
            {"preprocess_data, 1 worker": make_timer(single_worker), "tiktoken encode_ordinary": make_timer(encode_all)}, pairs
        ),
        megabytes,
        MIN_TIKTOKEN_RATIO,
    )


def compare_with_tokenizers(folder: Path, config: DataConfig, documents: Sequence[str], pairs: int) -> bool:
    """Compare the speed of preprocessing by one worker with that of a plain loop over texts in memory with Hugging Face tokenizers.

    Args:
        folder: folder with tokenizer.json, into which the input file and the datasets are written.
        config: settings of the tokenizer.
        documents: texts, of which every `_DOCUMENT_STRIDE`-th is processed.
        pairs: number of repetitions; each measures both programs.

    Returns:
        Whether preprocessing reaches `MIN_TOKENIZERS_RATIO` times the speed of the loop.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    subset = documents[::_DOCUMENT_STRIDE]
    megabytes = write_corpus(folder / "some.jsonl", subset)

    def encode_all() -> None:
        for text in subset:
            _ = tokenizer.encode(text).ids

    print(f"one worker compared with Hugging Face tokenizers in a plain loop, {megabytes:.0f} MB in {len(subset):,} documents")
    single_worker = build_preprocess_action(folder / "some.jsonl", folder / "some", config, 1)
    return print_speeds(
        run_in_turns({"preprocess_data, 1 worker": make_timer(single_worker), "tokenizers encode": make_timer(encode_all)}, pairs),
        megabytes,
        MIN_TOKENIZERS_RATIO,
    )


def compare_worker_counts(folder: Path, config: DataConfig, megabytes: float, pairs: int) -> bool:
    """Compare the speed of preprocessing a single file with two workers and with one worker.

    Args:
        folder: folder with the input file all.jsonl, into which the datasets are written.
        config: settings of the tokenizer.
        megabytes: size of the text in MB.
        pairs: number of repetitions; each runs both numbers of workers.

    Returns:
        Whether two workers reach `MIN_TWO_WORKER_RATIO` times the speed of one worker.
    """
    print(f"two workers compared with one, {megabytes:.0f} MB in one file")
    actions = {
        f"preprocess_data, {num_workers} workers": build_preprocess_action(
            folder / "all.jsonl", folder / f"by{num_workers}", config, num_workers
        )
        for num_workers in (2, 1)
    }
    return print_speeds(
        run_in_turns({name: make_timer(action) for name, action in actions.items()}, pairs), megabytes, MIN_TWO_WORKER_RATIO
    )


def measure_memory(folder: Path, config: DataConfig, gigabytes: float) -> bool:
    """Measure the peak memory of preprocessing a large jsonl file with two workers: that of the process that needs most.

    Args:
        folder: folder with the file all.jsonl. The large file consists of copies of it.
        config: settings of the tokenizer.
        gigabytes: size of the large file in GB.

    Returns:
        Whether the peak memory is below `MAX_MEMORY_MB`.
    """
    corpus = folder / "stream.jsonl"
    with corpus.open("wb") as file, (folder / "all.jsonl").open("rb") as source:
        while file.tell() < gigabytes * 1e9:
            source.seek(0)
            shutil.copyfileobj(source, file)
    size_gb = corpus.stat().st_size / 1e9
    tokenizer_args = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        str(config.vocab_file),
        "--merge-file",
        str(config.merge_file),
    ]
    tool_args = ("preprocess_data", "--input", corpus, "--output-prefix", folder / "stream")
    command, environment = build_module_command("megatron_lab", *tool_args)
    # An intermediate process starts the tool, because memory that a child shares with a large parent would count for the child.
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stderr=subprocess.PIPE, text=True)\n"
        "print(done.stderr.splitlines()[-2], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep='\\n')\n"
        "sys.exit(done.returncode)\n"
    )
    argv = [sys.executable, "-c", code, *command, *tokenizer_args, "--append-eod", "--workers", "2"]
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    summary, kilobytes = done.stdout.splitlines()
    peak_mb = int(kilobytes) * 1024 / 1e6
    is_met = peak_mb < MAX_MEMORY_MB
    print(f"peak memory of a process over {size_gb:.1f} GB of jsonl: {peak_mb:.0f} MB, limit {MAX_MEMORY_MB:.0f} MB", end="")
    print("" if is_met else "   MISSED")
    print(f"  {summary}", flush=True)
    return is_met


def run(settings: Settings) -> bool:
    """Compare the speed of preprocessing with tiktoken, with the package tokenizers, and between one and two workers. Then measure
    its peak memory. Return whether all limits hold.

    Raises:
        ValueError: the package tokenizers, which trains the vocabulary, is not installed; or the disk has too little free space.
    """
    from megatron_lab.data_tools.tokenizer_training import train_tokenizer

    documents = collect_texts(settings.megabytes)
    with tempfile.TemporaryDirectory(prefix="bench-preprocessing-") as name:
        folder = Path(name)
        stride = max(1, round(settings.megabytes * 1e6 / _TRAINING_BYTES))
        train_tokenizer("byte-bpe", documents[::stride], settings.vocab_size, [], folder)
        config = DataConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
        results = [
            compare_with_tiktoken(folder, config, documents, settings.pairs),
            compare_with_tokenizers(folder, config, documents, settings.pairs),
            compare_worker_counts(folder, config, sum(len(text.encode()) for text in documents) / 1e6, settings.pairs),
        ]
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < 3 * settings.stream_gb:
            raise ValueError(
                f"{folder}: only {free_gb:.0f} GB are free, but the benchmark needs {3 * settings.stream_gb:.0f} GB.\n"
                "  Set TMPDIR to a folder on a larger disk, or lower --stream-gb."
            )
        results.append(measure_memory(folder, config, settings.stream_gb))
    return all(results)
