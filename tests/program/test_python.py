"""megatron.api: the page of its documentation and the notebook run as they are written; runs in Python and on the command line are
the same; parts of the user's own train, resume, are planned and proved."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.api
from megatron.api import Callback, ConfigError, Trainer, settings, verify_layout, write_dataset
from megatron.checkpoint.save_folder import read_config
from megatron.config.cli import load
from megatron.config.save import to_dict
from megatron_lab.audit.trace_file import read_trace
from megatron_lab.commands import generate_text
from megatron_lab.foreign.huggingface.families import FAMILIES
from megatron_lab.verification import prove
from megatron_lab.verification.local_ranks import run_ranks
from tests.program.test_readme import commands
from tests.support.cli import ROOT
from tests.support.runs import TINY, arguments, launch, run
from tests.support.warm import run_forked_ranks

PAGE = (ROOT / "docs/python.md").read_text()
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def in_a_process(function: Callable[[], Any], folder: Path, timeout: float = 200.0) -> Any:
    """What a function returns that runs in a process of its own, in a folder, without a launcher's variables."""

    def call(rank: int) -> Any:
        for name in LAUNCHER:
            os.environ.pop(name, None)
        os.chdir(folder)
        return function()

    return run_ranks(1, call, init=False, timeout=timeout)[0]


def execute(blocks: list[str], namespace: dict[str, Any]) -> None:
    """Run blocks of code one after another, as cells of a notebook are."""
    for block in blocks:
        exec(compile(block, "<cell>", "exec"), namespace)


@pytest.fixture
def proved_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of proofs talk through shared memory, which is cheaper; those of the notebook keep gloo."""
    monkeypatch.setattr(prove, "run_ranks", run_forked_ranks)


@pytest.mark.usefixtures("proved_in_shared_memory")
def test_the_blocks_of_the_page_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the file that the page names, which the command line imports too."""
    files = dict(re.findall(r"```python (\S+)\n(.*?)```", PAGE, re.DOTALL))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    blocks = re.findall(r"```python(?: \S+)?\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 10 and files
    in_a_process(lambda: execute(blocks, {"__name__": "page"}), tmp_path)
    assert "--hidden-size 100 is not divisible" in capfd.readouterr().out
    (command,) = commands(PAGE)
    words = [str(tmp_path / word) if word in files else word for word in shlex.split(command)[2:]]
    ran = run([*words, "--hang-warn-s", "0"])
    assert "perplexity: " in ran and "lm loss: " in ran


def test_the_notebook_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert notebook["nbformat"] == 4 and not any(cell["outputs"] or cell["execution_count"] for cell in cells), "strip the outputs"
    in_a_process(lambda: execute(["".join(cell["source"]) for cell in cells], {"__name__": "__main__"}), tmp_path)
    said = capfd.readouterr().out
    assert "2 problems in the settings" in said and "tensor 2 x pipeline 1 x data 2 is equal" in said
    assert "'s'" in said, "the likeliest letter behind 'i' of 'is'"


def test_settings_are_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num-layers: 3\nlr: 1e-3\n")
    words = [
        *arguments(),
        "--lr",
        "0.002",
        "--no-decay-embeddings",
        "--clip-grad",
        "0.5",
        "--num-layers",
        "3",
        "--train-iters",
        "7",
    ]
    no_decay: dict[str, Any] = {"decay-embeddings": False}
    mine = settings(TINY, config=[file], lr=2e-3, num_layers=3, clip_grad=0.5, train_iters=7, **no_decay)
    assert mine.config == load(words, 1).config
    assert settings(to_dict(mine.config)).config == mine.config
    assert settings(file, **{**TINY, "num_layers": 3, "lr": 1e-3, "train_iters": 1}).config.model.num_layers == 3
    named = settings(
        model="smollm2-135m", **{**TINY, **dict.fromkeys(("hidden_size",), 576), "num_attention_heads": 9}, train_iters=1
    )
    assert named.config.model.swiglu and named.config.model.hidden_size == 576
    with pytest.raises(ConfigError) as error:
        settings(TINY, num_layer=2, lr="much", dry_run=True, optimizer="own", seed=object(), train_iters=1)
    told = str(error.value)
    assert "is not a text, a number" in told
    with pytest.raises(ConfigError) as error:
        settings(TINY, num_layer=2, lr="much", micro_batch_size=3, optimizer="own", imports=["no_such_module"], train_iters=1)
    told = str(error.value)
    for part in ("num-layer is not a flag", "lr much", "no_such_module cannot be imported: ModuleNotFoundError"):
        assert part in told, told
    assert "--optimizer own" not in told, "what the module would have registered is not known"


def losses_in(file: Path) -> list[float]:
    """The losses of a metrics file."""
    return [row["lm_loss"] for row in map(json.loads, file.read_text().splitlines()) if "lm_loss" in row]


class Notes(Callback):
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []

    def before_step(self, batch: Any, iteration: int) -> None:
        self.calls.append(f"before {iteration}")

    def after_step(self, progress: Any, result: Any, samples: int, learning_rate: float, weight_decay: float) -> None:
        self.calls.append(f"after {progress.iteration}")
        self.losses.append(result.loss)

    def on_log(self, progress: Any, values: Mapping[str, float]) -> None:
        self.calls.append(f"log {progress.iteration}")
        assert "lm_loss" in values

    def on_evaluation(self, progress: Any, values: Mapping[str, float]) -> None:
        self.calls.append(f"evaluation {progress.iteration} {sorted(values)}")

    def after_save(self, progress: Any, place: str) -> None:
        self.calls.append(f"save {Path(place).name}")

    def close(self) -> None:
        self.calls.append("close")


def test_a_run_by_hand_is_that_of_the_command_line(tmp_path: Path) -> None:
    """Steps by hand, in parts and after a failure make the run that one command makes; and it goes on where the other stops."""
    base: dict[str, Any] = {"train_iters": 6, "log_interval": 2, "eval_iters": 1, "eval_interval": 4, "device": "cpu"}
    file = tmp_path / "metrics.jsonl"
    run(arguments(**{**base, "log_interval": 1}, metrics_file=file, save=tmp_path / "line"))
    expected = losses_in(file)

    def by_hand() -> tuple[list[float], list[str]]:
        notes = Notes()
        deterministic = torch.are_deterministic_algorithms_enabled()
        mine = settings(TINY, **base, save=tmp_path / "hand", save_interval=3, deterministic_mode=True)
        with Trainer(mine, quiet=True, callbacks=[notes]) as trainer:
            trainer.fit(1)
            first = trainer.step()
            assert first is not None and first.loss == notes.losses[-1]
            with pytest.raises(ValueError, match=r"a step takes .*\[8, 17\]"):
                trainer.step(torch.zeros(3, 17, dtype=torch.long))

            class Stops(Callback):
                def after_step(self, progress: Any, *others: Any) -> None:
                    raise KeyError("stop")

            with pytest.raises(KeyError):
                trainer.fit(2, callbacks=[Stops()])
            assert trainer.iteration == 3
            trainer.fit()
        assert torch.are_deterministic_algorithms_enabled() == deterministic, "left as it was"
        return notes.losses, notes.calls

    losses, calls = in_a_process(by_hand, tmp_path)
    assert losses == expected, "to the last bit"
    assert calls[:6] == ["before 1", "after 1", "log 1", "close", "before 2", "after 2"]
    assert (
        "evaluation 4 ['validation_loss']" in calls
        and calls.count("save iter_0000006") == 1
        and calls[-1] == "evaluation 6 ['validation_loss']"
    )

    def goes_on() -> list[float]:
        notes, longer = Notes(), base | {"train_iters": 8, "override_opt_param_scheduler": True}
        for folder in (tmp_path / "line", tmp_path / "hand"):  # twice in one process
            with Trainer(settings(TINY, **longer, load=folder), quiet=True) as trainer:
                assert trainer.iteration == 6
                trainer.fit(callbacks=[notes])
                given = torch.arange(8 * 17).reshape(8, 17) % 60
                assert trainer.step(given) is not None and trainer.iteration == 9
        return notes.losses

    losses = in_a_process(goes_on, tmp_path)
    assert losses[:2] == losses[2:]


def test_steps_by_hand_are_watched_as_those_of_a_run(tmp_path: Path) -> None:
    """By the features that the settings ask for: the trace of the steps, and the account of their time in a checkpoint, which a
    trainer that loads it goes on with. The user's callbacks are closed with the trainer, and Python's collector stays as it was."""

    def by_hand() -> list[str]:
        notes = Notes()
        for name in ("run", "hand"):
            mine = settings(TINY, train_iters=4, device="cpu", save=tmp_path / name, save_trace=tmp_path / f"{name}.jsonl")
            with Trainer(mine, quiet=True, callbacks=[] if name == "run" else [notes]) as trainer:
                if name == "run":
                    gc.disable()
                    trainer.fit(3)
                    assert not gc.isenabled()
                    gc.enable()
                    continue
                for _ in range(3):
                    trainer.step()
                trainer.save()
                assert "close" not in notes.calls
        with Trainer(settings(TINY, train_iters=4, device="cpu"), quiet=True) as trainer:
            trainer.load(tmp_path / "hand")
            trainer.step()
            trainer.save(tmp_path / "longer")
        return notes.calls

    calls = in_a_process(by_hand, tmp_path)
    assert calls[-1] == "close" and calls.count("close") == 1 and calls[:2] == ["before 1", "after 1"]
    (by_run,), (hand,) = (read_trace(tmp_path / f"{name}.jsonl") for name in ("run", "hand"))
    assert hand.steps == by_run.steps and len(hand.steps) == 3
    spent = read_config(Path(tmp_path, "hand", "iter_0000003"))["goodput"]["seconds"]
    longer = read_config(Path(tmp_path, "longer", "iter_0000004"))["goodput"]["seconds"]
    assert longer["steps"] > spent["steps"] > 0.0 and longer["start-up"] > spent["start-up"] > 0.0


def test_a_callback_that_cannot_be_closed_leaves_the_save_folder_free(tmp_path: Path) -> None:
    """The record of the run ends with the fault, and another trainer may save there at once."""

    class Fails(Callback):
        def close(self) -> None:
            raise KeyError("cannot close")

    def fail() -> None:
        mine = settings(TINY, train_iters=4, device="cpu", save=tmp_path / "save")
        with pytest.raises(KeyError), Trainer(mine, quiet=True, callbacks=[Fails()]) as trainer:
            trainer.step()
        with Trainer(mine, quiet=True) as trainer:
            trainer.fit()

    in_a_process(fail, tmp_path)
    lines = (tmp_path / "save/history.jsonl").read_text().splitlines()
    assert any('"event": "end"' in line and "cannot close" in line for line in lines)


def test_what_fails_leaves_a_process_in_which_one_can_go_on(tmp_path: Path) -> None:
    def fail() -> str:
        wrong = settings(
            TINY, train_iters=2, device="cpu", load=tmp_path, exit_on_missing_checkpoint=True, attention_backend="math"
        )
        with pytest.raises(ValueError, match="holds no checkpoint"):
            Trainer(wrong, quiet=True)
        data = write_dataset(tmp_path / "text", "one text", tokenizer_type="ByteTokenizer")
        assert data == write_dataset(tmp_path / "text", ["one text"], tokenizer_type="ByteTokenizer")
        with pytest.raises(ValueError, match="contain other data"):
            write_dataset(tmp_path / "text", "another", tokenizer_type="ByteTokenizer")
        with Trainer(settings(TINY, train_iters=2, device="cpu"), quiet=True) as trainer:
            trainer.fit()
            return f"{trainer.iteration}"

    assert in_a_process(fail, tmp_path) == "2"


def test_under_a_launcher_twice(tmp_path: Path) -> None:
    """Two ranks make a trainer, close it, and make another: process groups are left and made anew."""

    def program(rank: int) -> list[float]:
        mine = settings(TINY, train_iters=3, device="cpu", tensor_model_parallel_size=2)
        found = []
        for _ in range(2):
            with Trainer(mine, quiet=True) as trainer:
                trainer.fit()
                logits = trainer.language_model().logits([[1, 2, 3]])
                found.append(float(logits.double().sum()))
        return found

    (one, two) = run_ranks(2, program, init=False)
    assert one == two and one[0] == one[1]


OWN = """
import torch
from megatron.api import UpdateRule, register_activation, register_optimizer, scaled
class Rule(UpdateRule):
    moments = ("speed",)
    def __init__(self, config):
        self.beta = config.sgd_momentum
    def make(self, targets, context):
        return scaled(targets, self.moments, self.kernel)
    def kernel(self, lists, update):
        (speed,) = lists.moments
        torch._foreach_mul_(speed, self.beta)
        torch._foreach_add_(speed, lists.grads)
        torch._foreach_add_(lists.main_params, torch._foreach_tanh(speed), alpha=-update.rate(lists.group))
class Cut(Rule):
    '''Takes the norm of what a rank happens to hold.'''
    def kernel(self, lists, update):
        for main, grad in zip(lists.main_params, lists.grads):
            main.sub_(grad / (1e-3 + grad.norm()), alpha=update.rate(lists.group))
register_optimizer("own", Rule, reads=["sgd_momentum"])
register_optimizer("cut", Cut)
register_activation("own", torch.nn.functional.mish)
register_activation("mixed", lambda x: x * x.softmax(-1))
"""
"""A user's module: a good optimizer and activation, and one of each that is wrong where parameters or channels are cut."""


def test_parts_of_the_user(tmp_path: Path) -> None:
    """Train on the command line at one layout, resume at another; the dry run plans them; without the module they are refused."""
    module = tmp_path / "user_parts.py"
    module.write_text(OWN)
    own: dict[str, Any] = {"imports": module, "optimizer": "own", "activation": "own", "sgd_momentum": 0.8, "train_iters": 4}
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(arguments(**own, fp64=True, metrics_file=whole))
    first = {**own, "fp64": True, "save": tmp_path / "run", "metrics_file": parts}
    run(arguments(**first, exit_interval=2, tensor_model_parallel_size=2), 2)
    run(arguments(**first, load=tmp_path / "run", use_distributed_optimizer=True), 2)
    losses = [losses_in(file) for file in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10) and losses[0][0] != losses[0][-1]
    flags = ["--load", str(tmp_path / "run"), "--prompt", "1 2 3", "--max-new-tokens", "2", "--dtype", "float32", "--json"]

    def use() -> tuple[list[str], int]:
        misfits = FAMILIES["gpt2"].describe_mismatches(settings(TINY, **{**own, "imports": [module]}).config.model)
        return misfits, generate_text.main([*flags, "--imports", str(module)])

    assert in_a_process(use, tmp_path) == (["--activation is own, there by default"], 0)
    said = run(arguments(**own, dry_run=True, world_size=8, tensor_model_parallel_size=2))
    assert "--optimizer own: the plan takes the size of its state from its module" in said and "moments" in said
    (refused,) = launch(arguments(**{**own, "imports": None}), 1)
    assert refused.code == 2 and "--optimizer own: --optimizer takes one of adam" in refused.stderr
    assert "--activation own: --activation takes a name that a module of --imports registers" in refused.stderr


@pytest.mark.usefixtures("proved_in_shared_memory")
def test_a_layout_is_proved_with_parts_of_the_user(tmp_path: Path) -> None:
    """Against one process; and what is wrong where parameters or channels are cut is found, at its place."""
    module = tmp_path / "parts_to_prove.py"
    module.write_text(OWN)

    def proofs() -> list[list[str]]:
        found = []
        shape = {**TINY, "train_iters": 2, "use_distributed_optimizer": True, "imports": [module]}
        tensor = {"tensor_model_parallel_size": 2}
        for ranks, steps, parts in (
            (2, 1, {"optimizer": "own", "activation": "own", **tensor}),
            (4, 1, {"optimizer": "cut"}),
            (2, 1, {"activation": "mixed", **tensor}),
        ):
            mine = settings(shape, **parts, world_size=ranks)
            with pytest.raises(ValueError, match="--reference self, which compares"):
                verify_layout(mine, ranks)
            (proof,) = verify_layout(mine, ranks, steps=steps, reference="self")
            found.append([] if proof.equal else [proof.findings[0].kind, proof.findings[0].place])
        return found

    good, cut, mixed = in_a_process(proofs, tmp_path)
    assert not good
    assert cut[0] == "update"
    assert mixed[0] == "forward" and mixed[1].startswith("layers.0.mlp")


def test_the_public_names_are_there() -> None:
    assert sorted(megatron.api.__all__) == megatron.api.__all__
    missing = [name for name in megatron.api.__all__ if not hasattr(megatron.api, name)]
    assert not missing
    named = set(re.findall(r"from megatron\.api import ([^(\n]+)", PAGE))
    assert {name.strip() for line in named for name in line.split(",")} <= {*megatron.api.__all__}
