"""A number that is not finite: the run says whether the data, a device or chance is to blame, at every kind of layout."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import Any

import pytest

import megatron.data_parallel.fsdp  # noqa: F401  # imported here once, not in every forked rank
from megatron.model.gpt import GPTChunk
from megatron.model.inputs import ModelInputs
from megatron_lab.audit.nonfinite import determine_causes
from tests.support.runs import arguments, at_iteration, launch, report

PACKED: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp4": (4, {"micro_batch_size": 1}),
    "tp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (4, {"pipeline_model_parallel_size": 2, "num_layers": 2}),
    "cp2": (4, {"context_parallel_size": 2, "mtp_num_layers": 1, "seq_length": 8, **PACKED}),
    "ep2": (2, {"num_experts": 4, "expert_model_parallel_size": 2, "disable_bias_linear": True}),
    "optim_grads_params": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
}
OF_DATA_RANK_1 = {"dp2": (1,), "dp4": (1,), "tp2": (2, 3), "pp2": (1, 3), "cp2": (2, 3), "ep2": (1,), "optim_grads_params": (1,)}
"""Ranks that hold the model together."""


BAD_DATA, BAD_DEVICE, PASSING = ("cp2",), ("ep2",), ("dp2",)
"""Where most goes to the other data rank, unless all are asked for."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    few = {test_bad_data_is_named: BAD_DATA, test_a_bad_device_is_named: BAD_DEVICE}.get(metafunc.function)
    if few is not None:
        metafunc.parametrize("layout", LAYOUTS if metafunc.config.getoption("--full") else few)
    if metafunc.function is test_a_passing_fault_is_called_so:
        metafunc.parametrize("layout", (*PASSING, "pp2") if metafunc.config.getoption("--full") else PASSING)


def outputs_change(fails: Callable[[int, ModelInputs], bool]) -> Callable[[int], None]:
    """For `before`: from iteration 2 on, what a chunk gives for these inputs is not finite, by rank."""

    def before(rank: int) -> None:
        def spoil(step: Any) -> None:
            forward = GPTChunk.forward

            def spoiled(self: GPTChunk, inputs: ModelInputs, *args: Any, **named: Any) -> Any:
                out = forward(self, inputs, *args, **named)
                return out * math.inf if fails(rank, inputs) else out

            GPTChunk.forward = spoiled  # type: ignore[method-assign]

        at_iteration(2, spoil)

    return before


def _told(layout: str, fails: Callable[[int, ModelInputs], bool]) -> str:
    size, flags = LAYOUTS[layout]
    settings = {"train_iters": 2, "num_layers": 1, "global_batch_size": 8, "hidden_dropout": 0.1, **flags}
    ended = launch(arguments(**settings), size, before=outputs_change(fails))
    assert [end.code for end in ended] == [1] * size, report(ended)
    assert all(end.stderr == "" for end in ended[1:]) and "Traceback" not in ended[0].stderr
    return ended[0].stderr


def test_bad_data_is_named(layout: str) -> None:
    """Whoever gets it. Of the 8 samples of the second step it is the last microbatch of data rank 1."""
    micro = LAYOUTS[layout][1].get("micro_batch_size", 2)
    first = 13 if micro == 1 else 14
    said = _told(layout, lambda rank, inputs: inputs.dropout_key is not None and inputs.dropout_key.first_sample == first)
    samples = f"{first}" if micro == 1 else f"{first} to {first + 1}"
    assert (
        f"also not finite with this data on another data rank: the cause is the data, samples {samples} (data rank 1, micro" in said
    ), said
    assert "microbatch 2)" in said and "device" not in said


def test_a_bad_device_is_named(layout: str) -> None:
    """Whatever it gets. Of several ranks that hold the model together it cannot be told which."""
    bad = OF_DATA_RANK_1[layout][-1]
    said = _told(layout, lambda rank, inputs: rank == bad)
    ranks = OF_DATA_RANK_1[layout]
    words = f"the device of rank {bad}" if len(ranks) == 1 else f"one of the devices of rank {', '.join(map(str, ranks))}"
    assert "also not finite on this data rank with other data, but finite with this data on another data rank: " in said, said
    assert f"{words} on node {socket.gethostname()}, or the weights on it" in said, said


def test_a_passing_fault_is_called_so(layout: str) -> None:
    calls: list[int] = []

    def once(rank: int, inputs: ModelInputs) -> bool:
        calls.append(rank)
        return rank == 1 and len(calls) == 1

    said = _told(layout, once)
    assert "a transient hardware fault" in said and "with this data" not in said and "other data" not in said


def test_with_one_data_rank_it_cannot_be_told() -> None:
    ended = launch(arguments(train_iters=2), before=outputs_change(lambda rank, inputs: True))
    assert ended[0].code == 1, report(ended)
    assert "with a single data rank it cannot be decided" in ended[0].stderr


def test_what_fails_everywhere_is_no_single_device() -> None:
    assert (
        "every data rank also fails with the data of another data rank: the cause is the weights, or a property of all data\n"
        in _told("dp2", lambda rank, inputs: True)
    )


@pytest.mark.parametrize(
    ("here", "there", "verdicts"),
    [
        ({1}, {2}, {1: "data"}),
        ({3}, {0}, {3: "data"}),
        ({1}, {1}, {1: "device"}),
        ({1, 2}, {2, 3}, {1: "data", 2: "data"}),
        ({1, 2}, {1, 2}, {1: "device", 2: "device"}),
        ({0, 2}, {1, 2}, {0: "data", 2: "device"}),
        ({1}, set(), {1: "both together"}),
        ({1}, {1, 2}, {1: "unknown"}),
        ({0, 1, 2, 3}, {0, 1, 2, 3}, {}),
    ],
)
def test_what_follows_of_four_data_ranks(here: set[int], there: set[int], verdicts: dict[int, str]) -> None:
    assert determine_causes(here, there, 4) == verdicts
