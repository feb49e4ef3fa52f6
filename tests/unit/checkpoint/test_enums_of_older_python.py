"""Checkpoints of Megatron-LM that Python up to 3.11.3 has written, which names the members of enums in ways of its own."""

from __future__ import annotations

import enum
import pickle
import signal
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron_lab.foreign.dist_checkpoint import DistCheckpoint
from megatron_lab.foreign.inert_pickle import CallRecord, read_pickle
from megatron_lab.foreign.legacy_checkpoint import LegacyCheckpoint
from tests.support.dist_checkpoints import write_dist
from tests.support.legacy_checkpoints import LegacyLayout, write_legacy
from tests.support.megatron_states import made_up
from tests.support.reference_runs import gpt2_like

WORD = "embedding.word.weight"


class Place(enum.Enum):
    HERE = "here"


@pytest.fixture
def python_3_11_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write enums as Python 3.11.0 to 3.11.3 do, and signals as all up to 3.11.3."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name)))
    monkeypatch.setattr(signal.Signals, "__reduce_ex__", lambda member, protocol: member.name)


@pytest.mark.usefixtures("python_3_11_2")
def test_the_same_weights_are_read(tmp_path: Path) -> None:
    shape = gpt2_like(vocab=61)
    state = made_up(shape)
    write_legacy(tmp_path / "legacy", shape, state.weights, LegacyLayout(tp=2))
    write_dist(tmp_path / "dist", state, LegacyLayout(tp=2))
    assert torch.equal(LegacyCheckpoint(tmp_path / "legacy").read(WORD), state.weights[WORD])
    assert torch.equal(DistCheckpoint(tmp_path / "dist").read(WORD), state.weights[WORD])


@pytest.mark.usefixtures("python_3_11_2")
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_member_is_read_as_a_record_of_its_class(protocol: int) -> None:
    name = f"{__name__}.Place"
    made = read_pickle(pickle.dumps(Place.HERE, protocol), "here", (name,))
    assert isinstance(made, CallRecord) and (made.name, made.args) == (name, ("HERE",))


@pytest.mark.parametrize("call", [(getattr, ("here", "HERE")), (getattr, (Place, "HERE", 1)), (getattr, ())])
def test_another_getattr_is_refused(call: tuple[object, tuple[object, ...]]) -> None:
    class Calls:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return call

    with pytest.raises(DamagedCheckpointError, match="cannot be read as a pickle"):
        read_pickle(pickle.dumps(Calls()), "here", (f"{__name__}.Place",))
