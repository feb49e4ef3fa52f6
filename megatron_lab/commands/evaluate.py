"""Evaluate a model: its perplexity on files, or tasks of lm-evaluation-harness.

    python tools/evaluate.py --load runs/a --files book.txt data/corpus_text_document
    python tools/evaluate.py --load model --files book.txt --window 1024 --stride 512     at least 512 tokens of context per token
    python tools/evaluate.py --load runs/a --tasks hellaswag arc_easy --limit 100         (extra: lm-eval)

--load names a model as for tools/generate_text.py: a --save folder, one checkpoint in it, a Hugging Face folder, or a checkpoint of
Megatron-LM. A file is an indexed dataset (its path without .bin and .idx), or has a format that tools/preprocess_data.py reads: a
text, which is one document, or records with the key "text" each, such as JSON lines. Documents are evaluated independently. The
first token of a document is predicted from the token that begins a text (bos, or the end-of-document token without a bos or with
--no-add-bos). A dataset that was written with another tokenizer is refused.

A document longer than the window is evaluated in several windows. Each window scores the next --stride tokens, and its other tokens
are context. A smaller stride gives each token more context, and takes longer. Perplexity per byte is comparable between models with
different tokenizers.

A model that does not fit on one device runs on several:

    torchrun --nproc-per-node 8 tools/evaluate.py --load runs/a --files book.txt --pipeline-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

from megatron_lab.commands.parser import ToolParser
from megatron_lab.data_tools.input_flags import add_encoding_flags, get_text_encoding
from megatron_lab.evaluation.open_model import (
    OpenedModel,
    add_computing_flags,
    add_model_flags,
    check_layout,
    open_model,
    print_to_stderr,
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__)
    add_model_flags(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--files",
        nargs="+",
        metavar="FILE",
        help="Compute the perplexity on these texts, folders of texts or indexed datasets (prefixes).",
    )
    source.add_argument("--tasks", nargs="+", metavar="TASK", help="Run these tasks of lm-evaluation-harness.")
    parser.add_argument(
        "--window", type=int, metavar="N", help="Set the number of tokens of a window (default: the model's --seq-length)."
    )
    parser.add_argument(
        "--stride", type=int, metavar="N", help="With --files, score N tokens per window (default: all tokens of a window)."
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="Evaluate N windows at once (default: windows of 4,096 tokens in total)."
    )
    parser.add_argument(
        "--max-documents", type=int, metavar="N", help="With --files, evaluate only the first N documents of each file."
    )
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="With --tasks, put N examples before each question (default: set by the task)."
    )
    parser.add_argument("--limit", type=int, metavar="N", help="With --tasks, evaluate only the first N questions of each task.")
    parser.add_argument("--include-path", metavar="FOLDER", help="With --tasks, also load your own tasks (YAML) from this folder.")
    parser.add_argument(
        "--allow-tokenizer-mismatch",
        action="store_true",
        help="With --files, also evaluate datasets that were written with another tokenizer than that of the model.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object with a key for each file or task.")
    add_encoding_flags(parser, strict_effect="refuses the file")
    add_computing_flags(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0 for success, 1 for an error, 2 for invalid flags."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    for name, group in {
        "stride": "files",
        "max_documents": "files",
        "allow_tokenizer_mismatch": "files",
        "encoding": "files",
        "errors": "files",
        "num_fewshot": "tasks",
        "limit": "tasks",
        "include_path": "tasks",
    }.items():
        if getattr(args, name) != parser.get_default(name) and getattr(args, group) is None:
            parser.error(f"--{name.replace('_', '-')} can only be used with --{group}")
    for name in ("window", "stride", "batch_size", "max_documents", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.context_parallel_size > 1:
        parser.error("--context-parallel-size must be 1 here: use tensor and pipeline ranks")
    check_layout(parser, args)
    try:
        with open_model(args, needs_tokenizer=args.tasks is not None) as loaded:
            results = _compute_perplexities(args, loaded) if args.files else _run_tasks(args, loaded)
            if loaded.context.rank == 0:
                print(json.dumps(results, indent=1) if args.json else "\n".join(_format_results(results)), flush=True)
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print_to_stderr(f"evaluate: {error}")
        return 1


def _compute_perplexities(args: argparse.Namespace, loaded: OpenedModel) -> dict[str, Any]:
    """Return the perplexity of each file, by path, as a JSON object per file. The key "told" of a file's object contains its values
    as text for the terminal."""
    from megatron_lab.evaluation.perplexity import compute_perplexity
    from megatron_lab.evaluation.scores import Scorer
    from megatron_lab.evaluation.texts import read_documents

    log = print_to_stderr if loaded.context.rank == 0 else lambda line: None
    for warning in _check_tokenizers(args, loaded):
        log(f"warning: {warning}")
    scorer = Scorer(loaded.model, loaded.context, args.batch_size, args.window, args.stride)
    results = {}
    for path in args.files:
        documents = itertools.islice(read_documents(path, loaded.tokenizer, get_text_encoding(args), log), args.max_documents)
        try:
            result = compute_perplexity(scorer, documents, loaded.tokenizer)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        results[path] = result.to_json() | {"told": str(result)}
    return results


def _check_tokenizers(args: argparse.Namespace, loaded: OpenedModel) -> list[str]:
    """Check that the datasets of --files were written with the tokenizer of the model. Return warnings. All ranks come to the same
    result.

    Raises:
        ValueError: a dataset was written with another tokenizer, and --allow-tokenizer-mismatch is not set.
    """
    from megatron_lab.data_tools.tokenizer_checks import check_datasets
    from megatron_lab.evaluation.texts import get_dataset_prefix
    from megatron_lab.foreign.source import StoredCheckpoint
    from megatron_lab.tokenizers.fingerprint import TokenizerFingerprint, get_fingerprint, read_config_entry

    config, source = loaded.tokenizer_config, loaded.source
    stored = read_config_entry(source.config, source.name) if isinstance(source, StoredCheckpoint) else None

    def get_current() -> TokenizerFingerprint | None:
        return stored if config is None else get_fingerprint(config, loaded.tokenizer)

    prefixes = [prefix for path in args.files if (prefix := get_dataset_prefix(path)) is not None]
    return check_datasets(
        dict.fromkeys(prefixes, False),
        get_current,
        has_texts=config is not None and config.tokenizer_type != "NullTokenizer",
        allows_mismatch=args.allow_tokenizer_mismatch,
    )


def _run_tasks(args: argparse.Namespace, loaded: OpenedModel) -> dict[str, Any]:
    """Run the tasks of lm-evaluation-harness. Return the metrics of each task, by its name, in JSON types."""
    from megatron_lab.evaluation.harness import HarnessModel, run_tasks
    from megatron_lab.evaluation.scores import Scorer

    assert loaded.tokenizer is not None
    scorer = Scorer(loaded.model, loaded.context, args.batch_size, args.window)
    answers = HarnessModel(loaded.model, loaded.context, loaded.tokenizer, scorer)
    return run_tasks(answers, args.tasks, num_fewshot=args.num_fewshot, limit=args.limit, include_path=args.include_path)


def _format_results(results: dict[str, Any]) -> list[str]:
    """Format the results as text, one line for each file or task.

    Args:
        results: metrics of each file or task, by its path or name.
    """
    lines = []
    for name, metrics in results.items():
        text = metrics.get("told") or ", ".join(
            f"{key.removesuffix(',none')} {value:.4g}" for key, value in metrics.items() if isinstance(value, float)
        )
        lines.append(f"{name}: {text}")
    return lines
