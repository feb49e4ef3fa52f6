"""Build small inputs for the recipes in docs/recipes/: text, conversations, a dataset, settings, and a Hugging Face model.

    python examples/make_demo.py [FOLDER]     (demo)

It prints the commands that it runs. It takes about 15 seconds and 4 MB of disk, and downloads nothing. The files are:

    text.jsonl                  source code of Python's asyncio, one file per line
    chats.jsonl                 300 short conversations
    tokenizer.model             sentencepiece vocabulary of 1,024 tokens
    data_text_document.bin, .idx   the text as tokens
    small.yaml                  settings of a Llama model with 150,000 parameters, its data and its batch size
    model/                      that model after 150 steps, with its tokenizer and a chat template
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUM_CHATS = 300
SETTINGS = """# Settings of a small run, for pretrain_gpt.py --config. Flags on the command line override them.
num-layers: 2
hidden-size: 64
num-attention-heads: 4
seq-length: 128
position-embedding-type: rope
normalization: RMSNorm
swiglu: true
disable-bias-linear: true
attention-dropout: 0
hidden-dropout: 0
data-path: {folder}/data_text_document
split: 90,10,0
tokenizer-type: GPTSentencePieceTokenizer
tokenizer-model: {folder}/tokenizer.model
micro-batch-size: 2
global-batch-size: 8
lr: 3e-3
lr-decay-style: constant
eval-iters: 4
log-interval: 10
log-format: short
device: cpu
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, with marks around the tokens that count in the loss."""


def write_chats(path: Path) -> None:
    """Write conversations about numbers as JSON lines, with a key "messages" as chat tools use it."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(NUM_CHATS):
            question, answer = f"What comes after {number}?", f"{number + 1} comes after {number}."
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def run_commands(folder: Path) -> None:
    """Run the commands that make the vocabulary, the dataset and the model, and print them.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    tokenizer = f"--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {folder}/tokenizer.model"
    settings = f"--config {folder}/small.yaml --train-iters 150 --eval-iters 0 --log-interval 50"
    commands = (
        f"tools/train_tokenizer.py --input {folder}/text.jsonl --kind sentencepiece-bpe --vocab-size 1024 --overwrite "
        f"--special-tokens '<|im_start|>' '<|im_end|>' --output {folder}/tokenizer.model",
        f"tools/preprocess_data.py --input {folder}/text.jsonl --output-prefix {folder}/data --append-eod --restart "
        f"--shuffle-seed 1 --cut-documents 2000 {tokenizer}",
        f"pretrain_gpt.py {settings} --no-report --no-loss-picture --log-format short --save {folder}/model-run",
        f"tools/checkpoint.py export {folder}/model-run {folder}/model",
    )
    for command in commands:
        script, *words = shlex.split(command)
        print(f"\n+ python {command}", flush=True)
        subprocess.run([sys.executable, str(ROOT / script), *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def main(argv: list[str] | None = None) -> int:
    """Build the files. Returns the exit status: 0, or 1 if a command failed or the folder exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo"), metavar="FOLDER", help="folder to create (demo)")
    folder: Path = parser.parse_args(argv).folder
    if (folder / "model").exists():
        print(f"{folder} is complete already; nothing is changed")
        return 0
    import asyncio

    from make_corpus import write_corpus

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(Path(asyncio.__file__).parent, folder / "text.jsonl")
        write_chats(folder / "chats.jsonl")
        (folder / "small.yaml").write_text(SETTINGS.format(folder=folder), encoding="utf-8")
        run_commands(folder)
        settings_file = folder / "model" / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text(encoding="utf-8")) | {"chat_template": CHAT_TEMPLATE}
        settings_file.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"make_demo.py: error: {error}", file=sys.stderr)
        return 1
    print(f"\nwrote {folder}: text.jsonl, chats.jsonl, tokenizer.model, data_text_document.bin and .idx, small.yaml, model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
