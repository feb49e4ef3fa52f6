"""Write the weights of a checkpoint as a Hugging Face folder, which transformers, vLLM and others open.

The source may be a training checkpoint of any layout, or any other folder that holds weights. Needs no accelerator. The peak of
memory is one parameter, in the type of the source and of the files; with --verify the whole model in float32.

--format onnx writes the forward of a small model as model.onnx (extra `onnx`), and compares onnxruntime's logits with those here.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.checkpoints.text import size
from megatron_lab.checkpoints.tokenizer_choice import add_choice, chosen_tokenizer, local_folder

if TYPE_CHECKING:
    from megatron_lab.foreign.source import WeightSource

FAMILIES = (
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "smollm3",
    "stablelm",
    "olmo2",
    "olmo3",
    "gpt_neox",
    "deepseek_v2",
    "deepseek_v3",
    "granite",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="SOURCE", help="a --save folder, one checkpoint in it, or a folder of another program")
    parser.add_argument("output", metavar="OUTPUT", type=local_folder, help="the folder to write; must not exist, or be empty")
    parser.add_argument("--step", type=int, metavar="N", help="the iteration to take, instead of the newest")
    parser.add_argument("--ema", action="store_true", help="take the moving average of the weights (of a run with --ema-decay)")
    parser.add_argument(
        "--format",
        choices=("huggingface", "onnx", "peft"),
        default="huggingface",
        help="what to write (huggingface); peft: the adapters of a run with --lora-rank alone",
    )
    parser.add_argument("--family", choices=FAMILIES, help="architecture to write (the first that has all parts of the model)")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (that of the source)")
    parser.add_argument("--max-shard-size", type=_bytes, metavar="SIZE", help="of one file, such as 500MB (5GB)")
    parser.add_argument("--peft-base", metavar="NAME", help="with --format peft, name or folder of the adapters' model")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare logits, and ids of texts, with transformers, and write nothing if they differ (logits by more than 1e-4)",
    )
    parser.add_argument(
        "--license",
        metavar="ID",
        help="for the model card: the Hub's identifier of a licence, such as apache-2.0 (a field to be filled in)",
    )
    add_choice(parser)


def run(args: argparse.Namespace) -> int:
    """Export and say what was written."""
    given = {"family": args.family, "dtype": args.dtype, "max-shard-size": args.max_shard_size, "license": args.license}
    if args.format == "onnx" and (odd := [name for name, value in given.items() if value is not None]):
        raise ValueError(f"--{odd[0]} has no effect with --format onnx, which writes one file in float32: leave it out")
    odd = [name for name in ("max-shard-size", "license") if given[name] is not None]
    if args.format == "peft" and (odd or args.verify):
        raise ValueError(f"--{odd[0] if odd else 'verify'} has no effect with --format peft, which writes adapters: leave it out")
    if args.format != "peft" and args.peft_base is not None:
        raise ValueError(f"--peft-base {args.peft_base} acts only with --format peft: leave it out, or add that")
    import torch

    from megatron.data.tokenizer import build_tokenizer
    from megatron_lab.checkpoints.exported import Export
    from megatron_lab.checkpoints.huggingface_writer import SpecialTokens, export
    from megatron_lab.checkpoints.model_card import UNKNOWN, Trained, model_card, next_steps
    from megatron_lab.data_tools.huggingface_tokenizer import splits_as_qwen2, write_huggingface_tokenizer
    from megatron_lab.foreign.as_used import as_used
    from megatron_lab.foreign.folded_source import folded
    from megatron_lab.foreign.huggingface.families import fitting
    from megatron_lab.foreign.opening import open_source

    trained = open_source(args.source, args.step, average=args.ema)
    if args.format == "peft":
        return _export_adapters(trained, args)
    source = trained if args.format == "onnx" else folded(as_used(trained))
    tokenizer = chosen_tokenizer(args, source)
    tokens = SpecialTokens()
    if tokenizer is not None:
        built = build_tokenizer(tokenizer)
        if built.vocab_size > source.vocab_size:
            raise ValueError(
                f"the tokenizer has {built.vocab_size:,} ids, but {source.name} only {source.vocab_size:,} rows in its embedding: "
                "this is not its tokenizer"
            )
        tokens = SpecialTokens(bos=built.bos, eos=built.eod, pad=built.pad)

    def write_tokenizer(folder: Path) -> list[str]:
        if tokenizer is None:
            return ["no tokenizer was written"]
        told = write_huggingface_tokenizer(tokenizer, folder, max_length=source.model.num_positions)
        if args.format == "onnx":
            return told
        if fitting(source.model, args.family).model_type == "qwen2" and not splits_as_qwen2(folder):
            told.append(
                "transformers 5 takes every tokenizer of a qwen2 model for Qwen's own, which splits texts otherwise than this one: "
                "open it with PreTrainedTokenizerFast, not AutoTokenizer"
            )
        return told

    if args.format == "onnx":
        return _onnx(source, args, write_tokenizer)

    def verify(folder: Path) -> str:
        from megatron_lab.checkpoints.against_transformers import compare_ids, compare_logits

        dtype = getattr(torch, args.dtype) if args.dtype else torch.float64  # float64 holds every value of the source
        told = compare_logits(source if args.dtype else trained, folder, dtype)  # what is folded is rounded only once
        has_files = (folder / "tokenizer_config.json").exists()
        return told if tokenizer is None or not has_files else f"{told} {compare_ids(tokenizer, folder)}"

    def card(made: Export, has_tokenizer: bool) -> str:
        return model_card(source, Trained.of(trained), made, licence=args.license or UNKNOWN, has_tokenizer=has_tokenizer)

    written = export(
        source,
        args.output,
        family=args.family,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        max_shard_bytes=args.max_shard_size or _bytes("5GB"),
        tokens=tokens,
        extras=write_tokenizer,
        check=verify if args.verify else None,
        card=card,
    )
    print(
        f"wrote {written.folder}: {written.num_parameters:,} parameters in {written.dtype} ({size(written.num_bytes)}) as "
        f"{written.family}; at most {size(written.peak_bytes)} of weights in memory at a time"
    )
    for note in written.notes:
        print(f"note: {note}")
    print(written.checked or "not compared with transformers (--verify does)")
    print("\n".join(next_steps(written.folder, has_tokenizer=(written.folder / "tokenizer_config.json").exists())))
    return 0


def _onnx(source: WeightSource, args: argparse.Namespace, write_tokenizer: Callable[[Path], list[str]]) -> int:
    """Write model.onnx and the tokenizer's files, and say how they are used."""
    from megatron_lab.checkpoints.onnx_writer import LOGITS, MODEL, TOKENS, export_onnx

    written = export_onnx(source, args.output, write_tokenizer)
    place = written.folder / MODEL
    print(f"wrote {place} ({size(written.num_bytes)}): {TOKENS} [batch, sequence] to {LOGITS} [batch, sequence, vocabulary]")
    for note in written.notes:
        print(f"note: {note}")
    print(written.checked)
    code = f"import onnxruntime as o; print(o.InferenceSession({str(place)!r}).run(None, {{{TOKENS!r}: [[1, 2, 3]]}})[0].shape)"
    print(f"next:\n  onnxruntime:  python -c {shlex.quote(code)}")
    return 0


def _export_adapters(source: WeightSource, args: argparse.Namespace) -> int:
    """Export adapters alone and say what was written."""
    import torch

    from megatron_lab.checkpoints.peft_writer import export_adapters

    dtype = getattr(torch, args.dtype) if args.dtype else None
    written = export_adapters(source, args.output, base=args.peft_base, family=args.family, dtype=dtype)
    print(
        f"wrote {written.folder}: adapters of {written.num_parameters:,} parameters for a {written.family} model, beside "
        f"{', '.join(written.targets)}"
    )
    base = args.peft_base or "BASE"
    print(f'open it with peft: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{written.folder}")')
    return 0


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB|)", text.upper())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(float(found[1]) * _UNITS[found[2]])
