"""Evaluate a model: its perplexity on files, or tasks of lm-evaluation-harness.

    python tools/evaluate.py --load runs/a --files book.txt data/corpus_text_document
    python tools/evaluate.py --load model --files book.txt --window 1024 --stride 512     each token with 512 before it, at least
    python tools/evaluate.py --load runs/a --tasks hellaswag arc_easy --limit 100         (extra: lm-eval)

--load names what tools/generate_text.py reads: a --save folder, one checkpoint in it, a Hugging Face folder, or a checkpoint of
Megatron-LM. A file is a text in UTF-8, which is one document, JSON lines with a "text" each (.jsonl), or an indexed dataset (its
path without .bin and .idx). Every document is read by itself. Its first token is predicted from what begins a text (bos, else the
end of a document).

A document longer than the window is read in several: each scores the next --stride tokens, with as much before them as fits. A
smaller stride gives each token more context, and takes longer. Perplexity a byte compares models with different tokenizers.

A model that does not fit one device runs on several:

    torchrun --nproc-per-node 8 tools/evaluate.py --load runs/a --files book.txt --pipeline-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

from megatron_lab.commands.parser import ToolParser
from megatron_lab.evaluation.opened import Opened, add_computing_flags, add_model_flags, check_layout, opened, tell


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    add_model_flags(flags)
    what = flags.add_mutually_exclusive_group(required=True)
    what.add_argument("--files", nargs="+", metavar="FILE", help="texts, or prefixes of indexed datasets: their perplexity")
    what.add_argument("--tasks", nargs="+", metavar="TASK", help="tasks of lm-evaluation-harness")
    flags.add_argument("--window", type=int, metavar="N", help="tokens that the model reads at once (its --seq-length)")
    flags.add_argument("--stride", type=int, metavar="N", help="with --files: tokens that a window scores (the whole window)")
    flags.add_argument("--batch-size", type=int, metavar="N", help="windows that are read at once (4,096 tokens of them)")
    flags.add_argument("--max-documents", type=int, metavar="N", help="with --files: only the first documents of each file")
    flags.add_argument("--num-fewshot", type=int, metavar="N", help="with --tasks: examples before a question (the task's own)")
    flags.add_argument("--limit", type=int, metavar="N", help="with --tasks: only the first questions of each")
    flags.add_argument("--include-path", metavar="FOLDER", help="with --tasks: a folder with tasks of your own (YAML)")
    flags.add_argument("--json", action="store_true", help="print one JSON object: a key for each file or task")
    add_computing_flags(flags)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, 1 if it cannot be done, 2 for wrong flags."""
    flags = parser()
    given = flags.parse_args(arguments)
    for name, group in {
        "stride": "files",
        "max_documents": "files",
        "num_fewshot": "tasks",
        "limit": "tasks",
        "include_path": "tasks",
    }.items():
        if getattr(given, name) is not None and getattr(given, group) is None:
            flags.error(f"--{name.replace('_', '-')} goes with --{group}")
    for name in ("window", "stride", "batch_size", "max_documents", "limit"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            flags.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(given, name)}")
    if given.context_parallel_size > 1:
        flags.error("--context-parallel-size must be 1 here: use tensor and pipeline ranks")
    check_layout(flags, given)
    try:
        with opened(given, needs_tokenizer=given.tasks is not None) as found:
            results = _perplexities(given, found) if given.files else _tasks(given, found)
            if found.context.rank == 0:
                print(json.dumps(results, indent=1) if given.json else "\n".join(_lines(results)), flush=True)
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        tell(f"evaluate: {error}")
        return 1


def _perplexities(given: argparse.Namespace, found: Opened) -> dict[str, Any]:
    from megatron_lab.evaluation.perplexity import perplexity
    from megatron_lab.evaluation.scores import Scorer
    from megatron_lab.evaluation.texts import documents_of

    scorer = Scorer(found.model, found.context, given.batch_size, given.window, given.stride)
    results = {}
    for path in given.files:
        documents = itertools.islice(documents_of(path, found.tokenizer), given.max_documents)
        try:
            made = perplexity(scorer, documents, found.tokenizer)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        results[path] = made.to_json() | {"told": str(made)}
    return results


def _tasks(given: argparse.Namespace, found: Opened) -> dict[str, Any]:
    from megatron_lab.evaluation.harness import Answers, run_tasks
    from megatron_lab.evaluation.scores import Scorer

    assert found.tokenizer is not None
    scorer = Scorer(found.model, found.context, given.batch_size, given.window)
    answers = Answers(found.model, found.context, found.tokenizer, scorer)
    return run_tasks(answers, given.tasks, num_fewshot=given.num_fewshot, limit=given.limit, include_path=given.include_path)


def _lines(results: dict[str, Any]) -> list[str]:
    """The results as text."""
    lines = []
    for name, numbers in results.items():
        told = numbers.get("told") or ", ".join(
            f"{key.removesuffix(',none')} {value:.4g}" for key, value in numbers.items() if isinstance(value, float)
        )
        lines.append(f"{name}: {told}")
    return lines
