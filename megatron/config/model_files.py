"""Models and recipes by name: `--model llama3-8b` reads the settings in models/llama3-8b.yaml, and `--recipe llama2-7b` the
published training settings in recipes/llama2-7b.yaml. All other settings of the command line override them.

Comments at the top of a file describe it: its first line names the source, and lines such as `# Tokens: 2 T` give properties.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron.config.errors import ConfigError, Violation
from megatron.config.parsed_flags import LIST_NAME, GivenFlag
from megatron.config.training import parse_batch_schedule

_FOLDERS = {"model": Path(__file__).resolve().with_name("models"), "recipe": Path(__file__).resolve().with_name("recipes")}
"""Folder of the files of each flag."""
_PROPERTY = re.compile(r"^# ([A-Z][a-z ]+): (.+)$", re.MULTILINE)
_ENDINGS = re.compile(r"(-(hf|base|pt|it|instruct|chat))+$")
"""Ends of names on the Hugging Face hub that say nothing about the shape of the model."""
_MAX_SUGGESTED = 3  # names to suggest for an unknown one
_SHAPE_FLAGS = {"num-layers", "hidden-size", "use-checkpoint-args"}
"""Flags that set the shape of a model, so that a recipe does not choose one."""
_SCHEDULES = ("lr-decay", "lr-warmup", "lr-wsd-decay")
_ALTERNATIVES = (
    {"train-iters", "train-samples"},
    *({f"{schedule}-{ending}" for ending in ("iters", "samples", "fraction")} for schedule in _SCHEDULES),
    {"global-batch-size", "step-batch-size-schedule"},
    {"rampup-batch-size", "step-batch-size-schedule"},
    {"bf16", "fp16"},
)
"""Flags that replace each other."""


@dataclass(frozen=True, eq=False)
class SettingsFile:
    """Model file or recipe, with the properties in its comments."""

    name: str
    path: Path
    source: str
    """Publication of the settings: the first line of the file."""
    properties: Mapping[str, str]
    """Properties by name, such as ``Tokens`` or ``Other names``."""

    @property
    def model(self) -> str:
        """Model that a recipe trains."""
        return self.properties["Model"]

    @property
    def other_names(self) -> list[str]:
        """Names of the same model besides `name`. A recipe has the names of its model."""
        file = read_descriptions("model")[self.model] if "Model" in self.properties else self
        return [name for name in file.properties.get("Other names", "").split(", ") if name]


def list_models() -> list[str]:
    """Return the names of all models that --model accepts, in alphabetical order."""
    return sorted(read_descriptions("model"))


@cache
def read_descriptions(flag: str) -> dict[str, SettingsFile]:
    """Read the comments of all files of a flag, `model` or `recipe`. Returns the files by name, in alphabetical order."""
    files = {}
    for path in sorted(_FOLDERS[flag].glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        source = text.splitlines()[0].removeprefix("# ")
        files[path.stem] = SettingsFile(path.stem, path, source, dict(_PROPERTY.findall(text)))
    return files


def find_settings_file(flag: str, name: str) -> SettingsFile:
    """Return the file of a model or recipe. Upper case, punctuation and the name of an organization do not matter:
    `meta-llama/Llama-3.1-8B` is `llama3-8b`.

    Args:
        flag: `model` or `recipe`.

    Raises:
        ConfigError: there is no file of this name. The message suggests similar names.
    """
    files = read_descriptions(flag)
    names_by_key = {normalize_name(other): file.name for file in files.values() for other in file.other_names}
    names_by_key |= {normalize_name(file_name): file_name for file_name in files}
    if name in files or normalize_name(name) in names_by_key:
        return files[name if name in files else names_by_key[normalize_name(name)]]
    raise ConfigError([_build_unknown_name(flag, name, names_by_key)])


def normalize_name(name: str) -> str:
    """Return the lower-case letters and digits of a model's name, without an organization and an ending such as `-hf`. Two names
    with the same result are names of the same model."""
    organization, slash, repository = name.rpartition("/")
    short_name = repository if slash and re.fullmatch(r"[\w-]+", organization) else name
    return re.sub(r"[^a-z0-9/\\]", "", _ENDINGS.sub("", short_name.lower().replace("_", "-")))


def _build_unknown_name(flag: str, name: str, names_by_key: Mapping[str, str]) -> Violation:
    message = f"--{flag} {name}: there is no {flag} of this name."
    key = normalize_name(name)
    if flag == "recipe" and (model := find_name("model", name)) is not None:
        reason = f"The training settings of {model} are not published completely. --model {model} sets its architecture."
        return Violation((f"--{flag}",), message, f"{reason} --{flag} {LIST_NAME} shows all recipes.")
    matching = sorted({names_by_key[other] for other in names_by_key if len(key) > 2 and other.startswith(key)})
    if len(matching) > _MAX_SUGGESTED:
        return Violation(
            (f"--{flag}",), message, f"--{flag} {LIST_NAME} {name} shows the {len(matching)} names that start like this."
        )
    close_keys = difflib.get_close_matches(key, names_by_key, n=8, cutoff=0.7) if key and not matching else []
    similar = matching or list(dict.fromkeys(names_by_key[other] for other in close_keys))[:_MAX_SUGGESTED]
    hint = f"Perhaps you meant {' or '.join(similar)}. " if similar else ""
    advice = " --config FILE reads the settings of any other model." if flag == "model" else ""
    return Violation((f"--{flag}",), message, f"{hint}--{flag} {LIST_NAME} shows all.{advice}")


def find_name(flag: str, name: str) -> str | None:
    """Return the name of the file that `find_settings_file` returns; None if no file has this name."""
    try:
        return find_settings_file(flag, name).name
    except ConfigError:
        return None


def get_launch_command(name: str) -> list[str]:
    """Return the launch script of a model and the flags that it needs, as words; empty if the model has no script. Run with
    MODEL=name in the environment, the script trains the model on GPUs of 80 GB."""
    return find_settings_file("model", name).properties.get("Launch script", "").split()


def read_model(name: str) -> tuple[list[GivenFlag], list[str]]:
    """Read the settings of a model. Returns them, and a note if the name is another name of the model.

    Raises:
        ConfigError: there is no model of this name.
    """
    from megatron.config.yaml_file import read_yaml  # imports PyYAML, which may be missing

    file = find_settings_file("model", name)
    notes = [] if name == file.name else [f"--model {name} is taken as {file.name}: {file.source}"]
    return read_yaml(str(file.path)), notes


def read_recipe(
    name: str, models: Sequence[str], other_settings: Sequence[GivenFlag]
) -> tuple[list[GivenFlag], str | None, list[str]]:
    """Read the settings of a recipe, without those that other settings replace.

    Args:
        name: name of the recipe.
        models: values of --model.
        other_settings: settings of the command line and of --config files, which take precedence. If they measure the run in steps
            and the recipe in samples, or the other way round, the lengths of the recipe's schedule are converted by its final
            global batch size.

    Returns:
        the settings, the name of the model that the recipe chooses (None if the user sets a model), and notes for the start-up log.

    Raises:
        ConfigError: there is no recipe of this name.
    """
    from megatron.config.yaml_file import read_yaml  # imports PyYAML, which may be missing

    recipe = find_settings_file("recipe", name)
    other_names = {item.name for item in other_settings if item.values != ("None",)}
    settings = read_yaml(str(recipe.path))
    batch_size = _get_batch_size(settings)
    replaced_names = {other for group in _ALTERNATIVES if group & other_names for other in group} - other_names
    overridden_names = {item.name.removeprefix("no-") for item in other_settings}
    replaced = [item for item in settings if item.name.removeprefix("no-") in replaced_names | overridden_names]
    settings = [item for item in settings if item.name not in replaced_names]
    notes = _format_recipe_notes(recipe, models, replaced)
    if "train-iters" in other_names or "train-samples" in other_names:
        unit = "iters" if "train-iters" in other_names else "samples"
        converted = {item: _convert_length(item, unit, batch_size) for item in settings if item.name not in other_names}
        settings = [converted.get(item, item) for item in settings]
        if changes := [f"{_format(old)} is {_format(new)}" for old, new in converted.items() if new != old]:
            batch = f"with the batch of {batch_size:,} sequences of the recipe"
            notes.append(f"--recipe {recipe.name}: because of your --train-{unit}, {', '.join(changes)}, {batch}.")
    has_model = bool(models) or bool(_SHAPE_FLAGS & other_names)
    return settings, None if has_model else recipe.model, notes


def _get_batch_size(settings: Sequence[GivenFlag]) -> int:
    """Return the final global batch size of a recipe."""
    values = {item.name: item.values for item in settings}
    steps = parse_batch_schedule(values.get("step-batch-size-schedule", ()))
    return steps[-1].batch_size if steps else int(values["global-batch-size"][0])


def _format(item: GivenFlag) -> str:
    return " ".join((item.spelling, *item.values))


def _convert_length(item: GivenFlag, unit: str, batch_size: int) -> GivenFlag:
    """Convert the length of a phase of the learning-rate schedule to a unit, `iters` or `samples`, by the global batch size."""
    schedule, _, item_unit = item.name.rpartition("-")
    if schedule not in _SCHEDULES or item_unit not in ("iters", "samples") or item_unit == unit:
        return item
    length = int(item.values[0])
    value = -(-length // batch_size) if unit == "iters" else length * batch_size
    return replace(item, name=f"{schedule}-{unit}", spelling=f"--{schedule}-{unit}", values=(str(value),))


def _format_recipe_notes(recipe: SettingsFile, models: Sequence[str], replaced: Collection[GivenFlag]) -> list[str]:
    notes = [f"--recipe {recipe.name} has the settings of {recipe.source}"]
    if "Not published" in recipe.properties:
        notes.append(
            f"--recipe {recipe.name} leaves to your flags, because it is not published: {recipe.properties['Not published']}"
        )
    if "Differs" in recipe.properties:
        notes.append(f"--recipe {recipe.name} differs from the publication: {recipe.properties['Differs']}")
    if replaced:
        notes.append(f"--recipe {recipe.name}: your settings replace {', '.join(map(_format, replaced))}.")
    model = find_settings_file("model", models[-1]).name if models else recipe.model
    if model != recipe.model:
        notes.append(f"--recipe {recipe.name} was published for {recipe.model}, not for {model}.")
    return notes
