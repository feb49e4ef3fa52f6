"""Flash attention of a pair of runs, by torch's operations that give the logarithms of sums and take those of the whole.

What sees what within a pair is a list of sequences: the documents of a run that meets itself, each causal; or of a run and an
earlier one the document that lies in both, all of which is seen.

Shapes: `q` queries of the run, `k` its keys, `b` microbatch, `g` key-value heads, `n` query heads, `d` head size, `T` tokens of all
sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatron.attention.documents import Documents, Run, flash_takes, to_device
from megatron.parallel.torch_private import flash_attention_backward, flash_attention_forward
from megatron.spec.layers import ScoreSpec

_ALL = -1
"""In a window: every token."""


class Side(NamedTuple):
    """Queries, or keys, of sequences laid end to end."""

    rows: torch.Tensor | None
    """Which rows of [q, b] (or [k, b]) they are, [T]; None for all of each sample in turn."""
    bounds: torch.Tensor
    """Where each sequence begins, and T: int32."""
    longest: int

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """[q, b, ...] to [T, ...]."""
        return x.transpose(0, 1).flatten(0, 1) if self.rows is None else x.flatten(0, 1).index_select(0, self.rows)

    def spread(self, x: torch.Tensor, like: torch.Tensor, rest: float = 0.0) -> torch.Tensor:
        """[T, ...] back to [q, b, ...], with a number where no sequence has a row."""
        length, batch = like.shape[:2]
        if self.rows is None:
            return x.unflatten(0, (batch, length)).transpose(0, 1)
        whole = x.new_full((length * batch, *x.shape[1:]), rest)
        return whole.index_copy_(0, self.rows, x).unflatten(0, (length, batch))


class Sequences(NamedTuple):
    """What sees what within a pair of runs."""

    queries: Side
    keys: Side
    causal: bool

    @classmethod
    def of(cls, queries: Run, keys: Run, documents: Documents) -> Sequences:
        """Those of a run with itself, or with an earlier one of which it sees something."""
        starts = range(0, documents.batch * documents.length, documents.length)
        device = documents.on_device.device
        if queries == keys:
            inner = [documents.within(start + queries[0], start + queries[1]) for start in starts]
            size = queries[1] - queries[0]
            own = _side(None, np.concatenate([np.diff([0, *ends, size]) for ends in inner]), device)
            return cls(own, own, causal=True)
        pairs = [
            (sample, seen) for sample, start in enumerate(starts) if (seen := _seen(queries, keys, documents, start)) is not None
        ]
        every = len(pairs) == documents.batch and all(seen == (queries, keys) for _, seen in pairs)

        def side(which: int, run: Run) -> Side:
            runs = [(sample, seen[which]) for sample, seen in pairs]
            rows = [(np.arange(*part) - run[0]) * documents.batch + sample for sample, part in runs]
            return _side(None if every else np.concatenate(rows), np.array([end - first for _, (first, end) in runs]), device)

        return cls(side(0, queries), side(1, keys), causal=False)


def _seen(queries: Run, keys: Run, documents: Documents, start: int) -> tuple[Run, Run] | None:
    """The queries of a sample whose document reaches back into the keys, and the keys in it."""
    first, end = documents.around(start + queries[0])
    if first - start >= keys[1]:
        return None
    return (queries[0], min(queries[1], end - start)), (max(keys[0], first - start), keys[1])


def _side(rows: np.ndarray | None, lengths: np.ndarray, device: torch.device) -> Side:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Side(None if rows is None else to_device(rows, device), to_device(bounds, device), int(lengths.max()))


def takes(queries: Run, keys: Run, q: torch.Tensor, v: torch.Tensor, scores: ScoreSpec, dropout: float) -> bool:
    """Whether flash attention computes a pair: where it could compute the whole, unless a window ends between the runs."""
    cut = scores.window is not None and queries != keys and queries[1] - 1 - keys[0] > scores.window
    return flash_takes(q, v, dropout) and scores.softcap is None and not cut


def attend(
    queries: Run, keys: Run, documents: Documents, scores: ScoreSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [q, b, g, r, d] to [k, b, g, d] and [k, b, g, d].

    Returns:
        the result [q, b, g, r, d], and the logarithms of sums [q, b, g, r]: minus infinity where a query sees nothing.
    """
    seen = documents.pairs(queries, keys, Sequences.of)
    packed = (seen.queries.packed(q.flatten(2, 3)), seen.keys.packed(k), seen.keys.packed(v))
    out, log_sums = flash_forward(*packed, seen, _window(scores, seen), scores.scale)
    heads = q.shape[2:4]
    whole = seen.queries.spread(log_sums.t(), q, -torch.inf)
    return seen.queries.spread(out, q).unflatten(2, heads), whole.unflatten(2, heads)


def differentiate(
    queries: Run,
    keys: Run,
    documents: Documents,
    scores: ScoreSpec,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of [q, b, g, r, d], [k, b, g, d] and [k, b, g, d].

    Args:
        grad, out: of all keys that a query sees, [q, b, g, r, d].
        log_sums: likewise, [q, b, g, r].
    """
    seen = documents.pairs(queries, keys, Sequences.of)
    given, own, found = (seen.queries.packed(x.flatten(2, 3)) for x in (grad, q, out))
    sums = seen.queries.packed(log_sums.flatten(2, 3)).t().contiguous()
    packed = (given, own, seen.keys.packed(k), seen.keys.packed(v), found, sums)
    grad_q, grad_k, grad_v = flash_backward(*packed, seen, _window(scores, seen), scores.scale)
    return seen.queries.spread(grad_q, q).unflatten(2, q.shape[2:4]), seen.keys.spread(grad_k, k), seen.keys.spread(grad_v, v)


def _window(scores: ScoreSpec, seen: Sequences) -> tuple[int, int]:
    """Tokens on the left and the right."""
    if not seen.causal:
        return _ALL, _ALL
    return _ALL if scores.reach(seen.queries.longest) is None else scores.window or 0, 0


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Sequences, window: tuple[int, int], scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [T, n, d], and the logarithms of sums in float32, [n, T]."""
    sizes = (seen.queries.bounds, seen.keys.bounds, seen.queries.longest, seen.keys.longest)
    out, log_sums, *_ = flash_attention_forward(
        *(q, k, v, *sizes, 0.0, seen.causal),
        return_debug_mask=False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return out, log_sums


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    seen: Sequences,
    window: tuple[int, int],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    sizes = (seen.queries.bounds, seen.keys.bounds, seen.queries.longest, seen.keys.longest)
    # There is no dropout, and so no state of a generator.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = flash_attention_backward(
        *(grad, q, k, v, out, log_sums, *sizes, 0.0, seen.causal, state, unused),
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return grads
