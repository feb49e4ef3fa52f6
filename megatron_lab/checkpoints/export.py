"""Write the weights of a checkpoint as a Hugging Face folder, which transformers, vLLM and other programs can open.

The source may be a training checkpoint of any layout, or any other folder that holds weights. No accelerator is needed. Peak
memory: one parameter, in the dtype of the source and in that of the files; with --verify the complete model in float32.

--format onnx writes the forward pass of a small model as model.onnx (extra `onnx`), and compares the logits of onnxruntime with
those of this framework.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lab.checkpoints.text import format_bytes, parse_step
from megatron_lab.checkpoints.tokenizer_choice import add_tokenizer_arguments, parse_local_folder, select_tokenizer
from megatron_lab.tokenizers.embedding_rows import fit_tokenizer
from megatron_lab.tokenizers.file_names import TOKENIZER_CONFIG

if TYPE_CHECKING:
    import torch

    from megatron_lab.foreign.source import WeightSource

DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand `export` to its parser."""
    parser.add_argument("source", metavar="SOURCE", help="a --save folder, one checkpoint in it, or a folder of another program")
    parser.add_argument(
        "output", metavar="OUTPUT", type=parse_local_folder, help="the folder to write; must not exist, or be empty"
    )
    parser.add_argument(
        "--step",
        type=parse_step,
        metavar="N|best",
        help="the iteration to take, instead of the newest, or best: the lowest validation loss (--keep-best)",
    )
    parser.add_argument("--ema", action="store_true", help="take the moving average of the weights (of a run with --ema-decay)")
    parser.add_argument(
        "--format",
        choices=("huggingface", "onnx", "peft"),
        default="huggingface",
        help="what to write (huggingface); peft: only the adapters of a run with --lora-rank",
    )
    parser.add_argument(
        "--family",
        metavar="MODEL_TYPE",
        help="architecture to write, such as llama; docs/models.md lists all (the first that has all parts of the model)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (that of the source)")
    parser.add_argument("--max-shard-size", type=_parse_bytes, metavar="SIZE", help="maximum size of a file, such as 500MB (5GB)")
    parser.add_argument("--peft-base", metavar="NAME", help="with --format peft, name or folder of the adapters' model")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare logits, and ids of texts, with transformers (and PEFT), and write nothing if they differ (logits by more "
        "than 1e-4)",
    )
    parser.add_argument(
        "--license",
        metavar="ID",
        help="for the model card: the Hub's identifier of a licence, such as apache-2.0 (a field to be filled in)",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="the chat template (jinja), or the built-in one chatml, with which the model was trained, instead of the tokenizer's",
    )
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `export`: write the weights in the requested format and print a summary. Returns the exit status."""
    requested = {"family": args.family, "dtype": args.dtype, "max-shard-size": args.max_shard_size, "license": args.license}
    if args.format == "onnx" and (unused := [name for name, value in requested.items() if value is not None]):
        raise ValueError(f"--{unused[0]} has no effect with --format onnx, which writes one file in float32. Remove the flag")
    if args.chat_template is not None and (args.format == "peft" or args.no_tokenizer):
        condition = "--format peft" if args.format == "peft" else "--no-tokenizer"
        raise ValueError(f"--chat-template has no effect with {condition}, which writes no tokenizer. Remove one of the flags")
    unused = [name for name in ("max-shard-size", "license") if requested[name] is not None]
    if args.format == "peft" and unused:
        raise ValueError(f"--{unused[0]} has no effect with --format peft, which writes adapters. Remove the flag")
    if args.format != "peft" and args.peft_base is not None:
        raise ValueError(
            f"--peft-base {args.peft_base} has an effect only with --format peft. Remove the flag, or add --format peft"
        )
    import torch

    from megatron.data.tokenizer import require_tokenizer_json
    from megatron_lab.checkpoints.export_result import Export
    from megatron_lab.checkpoints.generation_settings import NO_TOKENS, find_special_tokens
    from megatron_lab.checkpoints.huggingface_writer import export
    from megatron_lab.checkpoints.model_card import UNKNOWN, TrainingSummary, build_model_card, format_next_steps
    from megatron_lab.data_tools.huggingface_tokenizer import has_qwen2_pattern, write_huggingface_tokenizer
    from megatron_lab.data_tools.preprocess.chat import ChatTemplate
    from megatron_lab.foreign.huggingface.families import select_family
    from megatron_lab.foreign.inference_source import build_inference_source
    from megatron_lab.foreign.mup_folding import fold_mup_scaling
    from megatron_lab.foreign.open_source import open_source

    checkpoint = open_source(args.source, args.step, average=args.ema)
    if args.format == "peft":
        return _export_adapters(checkpoint, args)
    source = checkpoint if args.format == "onnx" else fold_mup_scaling(build_inference_source(checkpoint))
    tokenizer = select_tokenizer(args, source)
    tokens, token_notes, template_text = NO_TOKENS, list[str](), None
    if tokenizer is not None:
        tokenizer, built_tokenizer = fit_tokenizer(tokenizer, source.vocab_size, source.name)
        source.notes.extend((*built_tokenizer.notes, *built_tokenizer.text_notes))
        tokens, token_notes = find_special_tokens(tokenizer, source.vocab_size, chat_template=args.chat_template)
        if args.chat_template is not None:
            tokenizer_file = require_tokenizer_json(tokenizer.tokenizer_model, str(tokenizer.tokenizer_type))
            template_text = ChatTemplate.load(tokenizer_file, args.chat_template, None).text

    def write_tokenizer(folder: Path) -> list[str]:
        if tokenizer is None:
            return ["no tokenizer was written"]
        messages = write_huggingface_tokenizer(
            tokenizer, folder, max_length=source.model.num_positions, chat_template=template_text
        )
        if args.format == "onnx":
            return messages
        messages += token_notes
        if select_family(source.model, args.family).model_type == "qwen2" and not has_qwen2_pattern(folder):
            messages.append(
                "transformers 5 takes every tokenizer of a qwen2 model for Qwen's own, which splits texts otherwise than this one: "
                "open it with PreTrainedTokenizerFast, not AutoTokenizer"
            )
        return messages

    if args.format == "onnx":
        return _export_onnx(source, args, write_tokenizer)

    def verify(folder: Path) -> str:
        from megatron_lab.checkpoints.against_transformers import compare_ids, compare_logits

        dtype = getattr(torch, args.dtype) if args.dtype else torch.float64  # float64 represents every value of the source
        message = compare_logits(source if args.dtype else checkpoint, folder, dtype)  # the folded weights are rounded only once
        has_tokenizer = (folder / TOKENIZER_CONFIG).exists()
        return message if tokenizer is None or not has_tokenizer else f"{message} {compare_ids(tokenizer, folder)}"

    def build_card(result: Export, has_tokenizer: bool) -> str:
        return build_model_card(
            source, TrainingSummary.of(checkpoint), result, licence=args.license or UNKNOWN, has_tokenizer=has_tokenizer
        )

    result = export(
        source,
        args.output,
        family=args.family,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        max_shard_bytes=args.max_shard_size or _parse_bytes("5GB"),
        tokens=tokens,
        extras=write_tokenizer,
        check=verify if args.verify else None,
        card=build_card,
    )
    print(
        f"wrote {result.folder}: {result.num_parameters:,} parameters in {result.dtype} ({format_bytes(result.num_bytes)}) as "
        f"{result.family}; at most {format_bytes(result.max_memory_bytes)} of weights in memory at a time"
    )
    base_family = None if args.family else _find_base_family(None, source)
    if base_family not in (None, result.family):
        result.notes.append(
            f"the imported model is a {base_family} model. As a {result.family} model it computes the same; --family {base_family} "
            "writes it with its own names of tensors"
        )
    for note in (*result.notes, *(() if args.ema else _describe_precision(checkpoint, result.dtype))):
        print(f"note: {note}")
    print(result.verification or "not compared with transformers (--verify compares)")
    print("\n".join(format_next_steps(result.folder, has_tokenizer=(result.folder / TOKENIZER_CONFIG).exists())))
    return 0


def _describe_precision(checkpoint: WeightSource, dtype: str) -> Iterator[str]:
    """Yield a note if a run computed in 16 bits, but its float32 main parameters are written."""
    from megatron_lab.foreign.source import StoredCheckpoint

    if not isinstance(checkpoint, StoredCheckpoint) or dtype != "float32":
        return
    precision = checkpoint.settings.precision
    if precision.bf16 or precision.fp16:
        trained_dtype = "bfloat16" if precision.bf16 else "float16"
        yield (
            f"the weights are the float32 main parameters of a run that computed in {trained_dtype}; --dtype {trained_dtype} "
            "writes the weights with which it computed"
        )


def _export_onnx(source: WeightSource, args: argparse.Namespace, write_tokenizer: Callable[[Path], list[str]]) -> int:
    """Write model.onnx and the tokenizer's files, and print a command that runs the model in onnxruntime. Returns the exit
    status."""
    from megatron_lab.checkpoints.model_card import format_python_command
    from megatron_lab.checkpoints.onnx_writer import LOGITS, MODEL, TOKENS, export_onnx

    result = export_onnx(source, args.output, write_tokenizer)
    path = result.folder / MODEL
    print(f"wrote {path} ({format_bytes(result.num_bytes)}): {TOKENS} [batch, sequence] to {LOGITS} [batch, sequence, vocabulary]")
    for note in result.notes:
        print(f"note: {note}")
    print(result.verification)
    statements = (
        "import onnxruntime",
        f"session = onnxruntime.InferenceSession({str(path)!r})",
        f"print(session.run(None, {{{TOKENS!r}: [[1, 2, 3]]}})[0].shape)",
    )
    print(f"next:\n  onnxruntime:\n    {format_python_command(statements)}")
    return 0


def _export_adapters(source: WeightSource, args: argparse.Namespace) -> int:
    """Write only the LoRA adapters, as a PEFT folder, and print a summary. Returns the exit status."""
    import torch

    from megatron_lab.checkpoints.peft_writer import export_adapters
    from megatron_lab.data_tools.hub_snapshots import resolve_snapshot

    dtype = getattr(torch, args.dtype) if args.dtype else None
    peft_base = None if args.peft_base is None else resolve_snapshot(args.peft_base)
    family = args.family or _find_base_family(peft_base, source)
    note = _check_base_rows(peft_base, source)

    def verify(folder: Path) -> str:
        return _verify_adapters(source, folder, peft_base, family, dtype)

    result = export_adapters(source, args.output, base=peft_base, family=family, dtype=dtype, check=verify if args.verify else None)
    print(
        f"wrote {result.folder}: adapters of {result.num_parameters:,} parameters for a {result.family} model, next to "
        f"{', '.join(result.targets)}"
    )
    for text in filter(None, [note, *result.notes]):
        print(f"note: {text}")
    print(result.verification or "not compared with transformers (--verify compares)")
    base = peft_base or "BASE"
    print(f'open it with peft: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{result.folder}")')
    return 0


def _find_base_family(peft_base: str | None, source: WeightSource) -> str | None:
    """Return the architecture of the model to which adapters belong, because the names of its modules depend on it: that of the
    folder --peft-base, or else of the model that was imported, whose config.json lies next to the tokenizer. None if unknown.

    Raises:
        ValueError: the folder --peft-base has an architecture that cannot express the model of the adapters.
    """
    from megatron_lab.foreign.adapters import remove_lora_settings
    from megatron_lab.foreign.huggingface.families import FAMILIES

    for folder, content in _iter_base_configs(peft_base, source):
        family = FAMILIES.get(str(content.get("model_type")))
        if family is None:
            continue
        model = remove_lora_settings(source.model)
        if family.supports(model):
            return family.model_type
        if str(folder) == peft_base:
            reasons = "; ".join(family.describe_mismatches(model))
            raise ValueError(
                f"--peft-base {peft_base} is a {family.model_type} model, but not that of the adapters: {reasons}. Choose the "
                "model from which the run with adapters started"
            )
    return None


def _iter_base_configs(peft_base: str | None, source: WeightSource) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folder and the config.json of the model to which adapters belong: those of --peft-base, then those of the model
    that was imported, whose config.json lies next to the tokenizer."""
    from megatron_lab.foreign.huggingface.fields import CONFIG
    from megatron_lab.tokenizers.bpe_rules import read_json

    tokenizer_model = None if source.tokenizer is None else source.tokenizer.tokenizer_model
    folders = [Path(peft_base)] if peft_base is not None else []
    folders += [Path(tokenizer_model).parent] if tokenizer_model is not None else []
    for folder in folders:
        if (folder / CONFIG).is_file():
            content = read_json(folder / CONFIG, str(folder / CONFIG), "a JSON object")
            if isinstance(content, dict):
                yield folder, content


def _check_base_rows(peft_base: str | None, source: WeightSource) -> str | None:
    """Check that the model to which adapters belong has a row in its embedding for each token of the run. Adapters do not contain
    the rows that `import --add-tokens` has added.

    Returns:
        a note for the user if --peft-base is no folder of a model, and the imported model has fewer rows; otherwise None.

    Raises:
        ValueError: the folder --peft-base has fewer rows.
    """
    for folder, content in _iter_base_configs(peft_base, source):
        text_config = content.get("text_config")
        num_rows = (text_config if isinstance(text_config, dict) else content).get("vocab_size")
        if isinstance(num_rows, int) and num_rows < source.vocab_size:
            problem = (
                f"has {num_rows:,} rows in its embedding, but the run has {source.vocab_size:,} (import --add-tokens). The "
                "adapters do not contain the new rows. Export the checkpoint from which the run started (tools/checkpoint.py "
                "export CHECKPOINT MODEL), and name it: --peft-base MODEL"
            )
            if str(folder) == peft_base:
                raise ValueError(f"--peft-base {peft_base} {problem}")
            return f"the imported model {problem}"
        if str(folder) == peft_base:
            return None
    return None


def _verify_adapters(
    source: WeightSource, folder: Path, peft_base: str | None, family: str | None, dtype: torch.dtype | None
) -> str:
    """Compare the logits of the model with adapters between this framework and PEFT. Return a sentence for the summary.

    The base model of PEFT is that of --peft-base, if this is a local folder. Otherwise it is the base model in the checkpoint,
    written to a temporary folder.

    Args:
        source: model with adapters.
        folder: PEFT folder.
        peft_base: value of --peft-base.
        family: architecture of the base model; None for the first that supports it.
        dtype: dtype of the adapters in the folder; None for that of the source.

    Raises:
        CheckpointError: the logits differ.
    """
    import torch

    from megatron.checkpoint.errors import CheckpointError
    from megatron_lab.checkpoints.against_transformers import compare_logits
    from megatron_lab.checkpoints.huggingface_writer import export
    from megatron_lab.foreign.adapters import RoundedAdapters, build_base_source, merge_adapters

    merged = merge_adapters(source if dtype is None else RoundedAdapters(source, dtype))

    def compare(base: Path) -> str:
        return compare_logits(merged, base, torch.float64, adapters=folder)

    given_base_error = None
    if peft_base is not None and Path(peft_base).is_dir():
        try:
            return f"{compare(Path(peft_base))} The base model is {peft_base}."
        except CheckpointError as error:
            given_base_error = error
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-base-") as base:
        export(build_base_source(source), Path(base), family=family)
        message = compare(Path(base))
    if given_base_error is not None:
        raise CheckpointError(
            f"the adapters give the logits of {source.name} on the base model in that checkpoint, but not on --peft-base "
            f"{peft_base}: its weights are others. Choose the model from which the run with adapters started"
        ) from given_base_error
    return message


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB|)", text.upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size. Set a number of bytes, such as 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])
