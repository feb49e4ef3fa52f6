"""Late delivery: nothing is in place before it is waited for, and all is as always afterwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel import collectives
from megatron.parallel.collectives import Pending, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel import p2p
from megatron.pipeline_parallel.p2p import Messenger, TensorSpec
from megatron.spec.operations import Message
from megatron_lab.verification.late_collectives import late_delivery
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import CPU


def seen(pending: Pending, place: torch.Tensor) -> dict[str, Any]:
    """A place before the wait, after it, and after a second one."""
    before = place.tolist()
    assert pending.wait().data_ptr() == place.data_ptr()
    after = place.tolist()
    place.add_(1)
    pending.wait()
    return {"before": before, "after": after, "again": place.tolist()}


def on_two_ranks(rank: int) -> dict[str, Any]:
    context = make_context(Topology(tp=2), rank, CPU)
    group = context.group("tp")
    found: dict[str, Any] = {}
    with late_delivery() as notes:
        mine = torch.tensor([1.0 + rank, 10.0])
        pending = start_all_reduce(mine, group)
        mine += 100  # too late to be summed
        found["reduced"] = seen(pending, mine)
        whole = torch.zeros(4)
        whole[2 * rank : 2 * rank + 2] = 1.0 + rank
        found["gathered"] = seen(start_all_gather(whole[2 * rank : 2 * rank + 2], group, out=whole), whole)
        parts = torch.tensor([1.0, 2.0]) * (1 + rank)
        own = parts[rank : rank + 1]
        found["scattered"] = seen(start_reduce_scatter(parts, group, out=own), own)
        for name, start in {"gather": start_all_gather, "reduce-scatter": start_reduce_scatter}.items():
            sent = torch.ones(2)
            pending = start(sent, group)
            if rank:
                sent[0] = 2.0  # before it has left
            found[name] = [pending._result.tolist(), pending.wait().tolist()]
        found["notes"] = list(notes)
        found["at once"] = all_reduce(torch.ones(2), group).tolist()
    found["restored"] = [collectives.dist is dist, p2p.dist is dist]
    on_time = start_all_reduce(torch.ones(1), group)
    found["on time"] = [isinstance(on_time._work, dist.Work), on_time.wait().item()]
    return found


@functools.cache
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_are_in_place_when_they_were_waited_for(rank: int) -> None:
    found = two_ranks()[rank]
    assert found["reduced"] == {"before": [101.0 + rank, 110.0], "after": [3.0, 20.0], "again": [4.0, 21.0]}
    own = [0.0, 0.0, 2.0, 2.0] if rank else [1.0, 1.0, 0.0, 0.0]
    assert found["gathered"] == {"before": own, "after": [1.0, 1.0, 2.0, 2.0], "again": [2.0, 2.0, 3.0, 3.0]}
    assert found["scattered"] == {"before": [4.0] if rank else [1.0], "after": [3.0 + 3 * rank], "again": [4.0 + 3 * rank]}
    assert found["at once"] == [2.0, 2.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_written_to_on_its_way_is_noted(rank: int) -> None:
    """What comes is what was there when it began; meanwhile new memory holds zeros."""
    found = two_ranks()[rank]
    assert found["gather"] == [[0.0] * 4, [1.0] * 4] and found["reduce-scatter"] == [[0.0], [2.0]]
    noted = [f"the input of a {what} of 2 elements over ranks 0, 1" for what in ("gather", "reduce-scatter")]
    assert found["notes"] == (noted if rank else [])


def test_delivery_is_on_time_afterwards() -> None:
    assert [found["restored"] for found in two_ranks()] == [[True, True]] * 2
    assert [found["on time"] for found in two_ranks()] == [[True, 2.0]] * 2


def mail(rank: int) -> list[Any]:
    """What is in the receiver's buffer before it waits, and after; what was noted about the sender."""
    context = make_context(Topology(pp=2), rank, CPU)
    messenger = Messenger(context, {"hidden": TensorSpec((2,), torch.float32)})
    message = Message(False, 1, 0)
    with late_delivery() as notes:
        messenger.connect([(0, 1)])
        if rank == 0:
            hidden = torch.tensor([5.0, 6.0])
            messenger.send(message, 1, {"hidden": hidden})
            hidden += 1
            messenger.finish()
            return notes
        messenger.post_receive(message, 0)
        buffer = messenger._receives[message][0]["hidden"]
        before = buffer.tolist()
        return [before, messenger.receive(message)["hidden"].tolist()]


def test_messages_are_in_place_when_they_were_waited_for() -> None:
    assert run_ranks(2, mail) == [["a message of shape [2] to rank 1"], [[0.0, 0.0], [5.0, 6.0]]]


def test_delivery_is_on_time_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), late_delivery():
        raise ValueError("inside")
    assert collectives.dist is dist and p2p.dist is dist
