"""What is suggested where the first thing that would help is not what a user can run."""

from __future__ import annotations

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError, Violation
from tests.support.rule_cases import BASE, argv, reported


def refused(extra: str, world_size: int = 1) -> dict[str, Violation]:
    """What `load` says against the base with more flags, by the first flag that takes part."""
    with pytest.raises(ConfigError) as caught:
        load(argv(extra), world_size)
    return {violation.flags[0]: violation for violation in caught.value.violations}


@pytest.mark.parametrize("flag", [*(name for name, value in BASE.items() if value.isdigit()), "--lr"])
def test_a_required_setting_that_is_given_as_zero_is_not_missing(flag: str) -> None:
    if flag not in ("--train-iters", "--vocab-size", "--lr"):
        with pytest.raises(ConfigError, match=f"{flag} is missing"):
            load([word for pair in BASE.items() if pair[0] != flag for word in pair if word], 1)
    found = refused(f"{flag} 0")
    assert found[flag].message in (f"{flag} 0 is out of range.", f"{flag} 0.0 is out of range.")
    assert found[flag].reason.startswith("It must be a")
    assert not any("missing" in violation.message for violation in found.values())


def test_a_zero_in_a_file_is_given_too(tmp_path: pytest.TempPathFactory) -> None:
    file = f"{tmp_path}/run.yaml"
    with open(file, "w", encoding="utf-8") as out:
        out.write("model: {num_layers: 0}\n")
    with pytest.raises(ConfigError, match="--num-layers 0 is out of range") as caught:
        load(["--config", file], 1)
    assert "--num-layers is missing" not in str(caught.value) and "missing too: --hidden-size," in str(caught.value)


@pytest.mark.parametrize("batch", [0, -5])
@pytest.mark.parametrize(("world_size", "tensor", "nearest"), [(8, 1, 16), (8, 2, 8), (1, 1, 2), (8, 12, 2)])
def test_the_nearest_batch_is_a_whole_step(batch: int, world_size: int, tensor: int, nearest: int) -> None:
    found = refused(f"--global-batch-size {batch} --tensor-model-parallel-size {tensor}", world_size)
    assert found["--global-batch-size"].nearest == (f"--global-batch-size {nearest}",)


TENSOR = "--tensor-model-parallel-size"
SIXTEEN = "--num-attention-heads 16 --hidden-size 128"


@pytest.mark.parametrize(
    ("batch", "nearest"),
    [
        (20, (f"{TENSOR} 4", f"{TENSOR} 8")),  # TP 2 would bring up that it is not divisible by 2 x 4
        (18, (f"{TENSOR} 8",)),  # of those that fit, TP 8 is the only one that leaves nothing
        (16, (f"{TENSOR} 4", f"{TENSOR} 2")),
    ],
)
def test_what_fits_the_world_goes_before_what_does_not(batch: int, nearest: tuple[str, ...]) -> None:
    """16 ranks would divide the heads, but not the world."""
    found = {
        violation.message.split()[0]: violation for violation in reported(f"{SIXTEEN} {TENSOR} 3 --global-batch-size {batch}", 8)
    }
    assert found["--num-attention-heads"].nearest[: len(nearest)] == nearest
    assert found["The"].nearest[: len(nearest)] == nearest
    assert f"{TENSOR} 16" not in [item for violation in found.values() for item in violation.nearest]


def test_layouts_that_bring_up_the_batch_go_before_those_that_do_not_fit() -> None:
    """With a batch of one sequence no layout leaves nothing, and still one that fits has to be taken first."""
    found = {
        violation.message.split()[0]: violation
        for violation in reported(f"{TENSOR} 5 --micro-batch-size 1 --global-batch-size 1", 8)
    }
    assert found["--num-attention-heads"].nearest == (f"{TENSOR} 4", f"{TENSOR} 2")
    assert not any(f"{TENSOR} {size}" in violation.nearest for violation in found.values() for size in (6, 12))


def test_a_batch_of_no_whole_microbatches_is_told_whatever_the_layout() -> None:
    found = refused(f"{TENSOR} 3 --micro-batch-size 4 --global-batch-size 7", 8)["--global-batch-size"]
    assert found.message == "--global-batch-size 7 is not divisible by --micro-batch-size 4."
    assert found.nearest == ("--global-batch-size 8", "--global-batch-size 4", "--micro-batch-size 7", "--micro-batch-size 1")
    assert "--global-batch-size" not in refused(f"{TENSOR} 3 --micro-batch-size 4 --global-batch-size 8", 8)


def test_steps_to_skip_beyond_the_end_are_answered_however_many() -> None:
    found = refused(f"--iterations-to-skip {' '.join(map(str, range(100, 5_000)))}")["--iterations-to-skip"]
    assert found.nearest == ("--iterations-to-skip 100",)
