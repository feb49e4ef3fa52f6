"""What follows from settings before the rules judge them: the kind of tokenizer, and what is taken back because it does nothing.

A setting that does nothing must do no harm either. So it gets its default again, and nothing behind the settings ever sees it.
"""

from __future__ import annotations

import os
from dataclasses import replace

from megatron.config.checks.finding import has_effect, is_changed, shown, value_of, without
from megatron.config.config import Config
from megatron.config.data import (
    TOKENIZER_FILES,
    TOKENIZER_NEEDS,
    USUAL_ROWS,
    DataConfig,
    TokenizerType,
    has_own_splits,
    parse_split,
)
from megatron.config.flags import Flag, flag_for, flags
from megatron.config.setting import typed


def settled(config: Config) -> tuple[Config, list[str]]:
    """The settings with what follows from them, and a line for the start-up log about each change."""
    config, notes = _with_tokenizer(config)
    by_condition: dict[str, list[str]] = {}
    while idle := [flag for flag in flags().values() if is_changed(config, flag.field) and _is_idle(flag, config)]:
        for flag in idle:
            assert flag.facts.acts is not None
            by_condition.setdefault(flag.facts.acts.words, []).append(shown(config, flag.field))
        config, _ = without(config, *(flag.field for flag in idle)).apply(config, 1)
    notes += [
        no_effect(given, f"{'it acts' if len(given) == 1 else 'they act'} only {words}") for words, given in by_condition.items()
    ]
    return _without_validation(config, notes)


def _is_idle(flag: Flag, config: Config) -> bool:
    """Whether a setting does nothing and no harm: it is not strict, or what would make it act would do nothing itself."""
    acts = flag.facts.acts
    if acts is None or has_effect(config, flag.field):
        return False
    others = [(name, flag_for(name).facts.acts) for name in acts.others]
    return not acts.strict or all(other is not None and not other.strict and not has_effect(config, name) for name, other in others)


def with_vocabulary(config: Config) -> tuple[Config, list[str]]:
    """Settings of a job that is only planned or proved, with a size of the vocabulary where the tokenizer's files are not here; and
    the note that says so."""
    data = config.data
    files = [field for field in TOKENIZER_NEEDS.get(data.tokenizer_type or "", ()) if field in TOKENIZER_FILES]
    missing = [field for field in files if (path := value_of(config, field)) is not None and not os.path.exists(path)]
    if data.vocab_size is not None or not missing:
        return config, []
    assert data.tokenizer_type is not None
    rows = USUAL_ROWS[data.tokenizer_type]
    gone = " and ".join(shown(config, field) for field in missing)
    verb = "is" if len(missing) == 1 else "are"
    note = f"{gone} {verb} not here: a vocabulary of {rows:,} is assumed, as is usual with {data.tokenizer_type} (--vocab-size)."
    return replace(config, data=replace(data, vocab_size=rows)), [note]


def no_effect(given: list[str], reason: str) -> str:
    """The note about settings without effect that share a reason."""
    return f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {reason}."


def _with_tokenizer(config: Config) -> tuple[Config, list[str]]:
    """The kind of tokenizer follows from its files, if it is not given."""
    data = config.data
    if data.tokenizer_type is not None or (found := _tokenizer_of(data)) is None:
        return config, []
    kind, fields = found
    note = f"--tokenizer-type is {kind}, which follows from {' and '.join(typed(field) for field in fields)}."
    return replace(config, data=replace(data, tokenizer_type=kind)), [note]


def _tokenizer_of(data: DataConfig) -> tuple[TokenizerType, tuple[str, ...]] | None:
    """A kind of tokenizer, and the settings from which it follows."""
    if data.vocab_file is not None and (data.merge_file is not None or data.tokenizer_model is None):
        return "GPT2BPETokenizer", ("vocab_file", "merge_file") if data.merge_file is not None else ("vocab_file",)
    if data.tokenizer_model is not None:
        name = os.path.basename(data.tokenizer_model.rstrip("/"))
        if name.endswith(".model"):
            return "SentencePieceTokenizer", ("tokenizer_model",)
        if name == "tokenizer.json" or os.path.isfile(os.path.join(data.tokenizer_model, "tokenizer.json")):
            return "HuggingFaceTokenizer", ("tokenizer_model",)
    elif data.mock_data and data.vocab_size is not None:
        return "NullTokenizer", ("mock_data", "vocab_size")
    return None


def _without_validation(config: Config, notes: list[str]) -> tuple[Config, list[str]]:
    """Without validation documents there is no evaluation."""
    data, training = config.data, config.training
    if data.mock_data or has_own_splits(data) or training.eval_iters <= 0:
        return config, notes
    try:
        learned, validation, _ = parse_split(data.split)
    except ValueError:  # a rule tells it
        return config, notes
    if not learned or validation:
        return config, notes
    note = f"{shown(config, 'split')} leaves no documents for validation, so there is no evaluation (as with --eval-iters 0)."
    return replace(config, training=replace(training, eval_iters=0)), [*notes, note]
