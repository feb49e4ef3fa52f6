"""Layouts of few ranks that together show what one of many would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MIDDLE = 3
"""Pipeline stages from which on there is one that is neither first nor last."""
_MOST_STAGES = 4
"""With so many, a stage in the middle has neighbours in the middle."""


@dataclass(frozen=True)
class RankSizes:
    """Ranks on each axis."""

    tp: int
    pp: int
    dp: int

    @property
    def world_size(self) -> int:
        """Of all axes together."""
        return self.tp * self.pp * self.dp


def reduced_sizes(whole: RankSizes, max_ranks: int, *, hybrid: bool) -> list[RankSizes]:
    """Sizes of one or several runs: all axes together where they fit, else each pair of them, else each alone; and where the
    pipeline has stages in the middle, a run that has some.

    Args:
        max_ranks: of one run.
        hybrid: groups of data ranks each share a copy of the model, which takes four data ranks to be seen.

    Raises:
        ValueError: so few ranks show nothing of it.
    """
    if whole.world_size <= max_ranks:
        return [whole]
    small = RankSizes(min(whole.tp, 2), min(whole.pp, 2), min(whole.dp, 4 if hybrid else 2))
    for groups in ([(small.tp, small.pp, small.dp)], _pairs(small), _alone(small)):
        found = [RankSizes(*sizes) for sizes in groups]
        if found and all(each.world_size <= max_ranks for each in found):
            break
    else:
        if hybrid and whole.dp >= 2:
            return reduced_sizes(whole, max_ranks, hybrid=False)
        raise ValueError(f"--max-ranks {max_ranks} runs nothing of this layout. Give at least 2.")
    found = [_with_middle(each, whole, max_ranks) if each.pp > 1 else each for each in found]
    if whole.pp >= _MIDDLE and not any(each.pp >= _MIDDLE for each in found):
        longer = (RankSizes(tp, pp, 1) for tp in (small.tp, 1) for pp in range(min(whole.pp, _MOST_STAGES), _MIDDLE - 1, -1))
        found += [each for each in longer if each.world_size <= max_ranks][:1]
    return list(dict.fromkeys(found))


def _pairs(small: RankSizes) -> list[tuple[int, int, int]]:
    return list(_distinct([(small.tp, small.pp, 1), (small.tp, 1, small.dp), (1, small.pp, small.dp)], least=2))


def _alone(small: RankSizes) -> list[tuple[int, int, int]]:
    return list(_distinct([(small.tp, 1, 1), (1, small.pp, 1), (1, 1, small.dp)], least=1))


def _distinct(candidates: list[tuple[int, int, int]], least: int) -> Iterator[tuple[int, int, int]]:
    """Those in which at least so many axes have several ranks."""
    return (sizes for sizes in dict.fromkeys(candidates) if sum(size > 1 for size in sizes) >= least)


def _with_middle(sizes: RankSizes, whole: RankSizes, max_ranks: int) -> RankSizes:
    """With as many stages as there is room for, up to those that show a middle."""
    room = max_ranks // (sizes.tp * sizes.dp)
    return RankSizes(sizes.tp, max(sizes.pp, min(whole.pp, _MOST_STAGES, room)), sizes.dp)
