"""Megatron-LM's order of samples, step by step on lists: what `--data-order megatron` must equal."""

from __future__ import annotations

import math

import numpy as np


def samples(documents: list[list[int]], seq_length: int, num_samples: int | None, seed: int) -> list[list[int]]:
    """All samples that are made for so many samples asked for, in their order."""
    stream = np.random.RandomState(seed)
    tokens = sum(len(document) for document in documents)
    num_epochs = 1
    while num_samples is not None and num_epochs * tokens < num_samples * seq_length + 1:
        num_epochs += 1
    in_one_epoch = (tokens - 1) // seq_length
    before_last = ((num_epochs - 1) * tokens - 1) // seq_length
    apart = num_samples is not None and num_epochs > 1 and num_samples - before_last < int(0.80 * in_one_epoch)

    order: list[int] = []
    for epochs in (num_epochs - 1, 1) if apart else (num_epochs,):
        numbers = np.array([*range(len(documents))] * epochs, dtype=np.int32)
        stream.shuffle(numbers)
        order += numbers.tolist()

    laid = [token for document in order for token in documents[document]]
    windows = []
    start = 0
    while start + seq_length + 1 <= len(laid):
        windows.append(laid[start : start + seq_length + 1])
        start += seq_length  # the last token of a window is the first of the next

    shuffled: list[int] = []
    for first, stop in ((0, before_last), (before_last, len(windows))) if apart else ((0, len(windows)),):
        numbers = np.arange(first, stop, dtype=np.uint32)
        stream.shuffle(numbers)
        shuffled += numbers.tolist()
    return [windows[number] for number in shuffled]


def normalised(weights: list[float]) -> list[float]:
    """Weights that sum to 1."""
    array = np.array(weights, dtype=np.float64)
    return [float(weight) for weight in array / np.sum(array)]


def requested(weights: list[float], num_samples: int) -> list[int]:
    """Samples that each dataset of a blend is asked for."""
    return [math.ceil(math.ceil(num_samples * weight) * 1.005) for weight in normalised(weights)]


def choices(weights: list[float], num_samples: int, *, by_size: bool = False) -> list[tuple[int, int]]:
    """Dataset of each sample of a blend, and which of its samples it is."""
    shares = normalised(weights)
    if not by_size:  # weights that a user gives are normalised when the datasets are built, and again when they are blended
        shares = normalised(shares)
    taken = [0] * len(shares)
    found = []
    for number in range(num_samples):
        best, most = 0, -math.inf
        for dataset, share in enumerate(shares):
            behind = share * max(float(number), 1.0) - float(taken[dataset])
            if behind > most:
                best, most = dataset, behind
        found.append((best, taken[best]))
        taken[best] += 1
    return found
