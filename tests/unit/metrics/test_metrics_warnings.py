"""What is told of a run that likely goes wrong: when it is, once, and not where nothing is wrong."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from megatron_lab.monitoring.run_warnings import Corpus, LossWarnings, check_learning_rate, get_usual_learning_rate

ORDERED = Corpus(1000, True)


def told(watch: LossWarnings, losses: list[float]) -> list[str]:
    return [words for at, loss in enumerate(losses, 1) if (words := watch.check_step(loss, 8 * at)) is not None]


def test_a_loss_above_its_start_for_long() -> None:
    """Not one that falls, that does not move, or that is above for a while; once; after a restart by the start that is known."""
    draw = random.Random(0)
    noise = [10.8 + draw.gauss(0, 0.05) for _ in range(400)]
    falls = [10.8 - 0.01 * at for at in range(400)]
    for fine in (noise, falls, [10.8] * 5 + [13.0] * 30 + falls):
        assert not told(LossWarnings(1000, ORDERED), fine)
    (words,) = told(LossWarnings(1000, ORDERED), [10.8] * 5 + [12.0] * 400)
    assert "above its initial value for 50 iterations: 10.80 at the start" in words and "a third of --lr" in words
    assert not told(LossWarnings(8000, ORDERED), [10.8] * 5 + [12.0] * 395), "a longer run is given longer"
    assert len(told(LossWarnings(1000, ORDERED, [4.0, 3.0, 4.0, 4.0, 4.0]), [5.0] * 60)) == 1


def test_noise_is_no_rise() -> None:
    """A run from pretrained weights has a noisy loss that does not move; the lowest of its first losses is far below the mean."""
    for seed in range(20):
        draw = random.Random(seed)
        assert not told(LossWarnings(1000, ORDERED), [2.0 + draw.gauss(0, 0.3) for _ in range(400)])


def test_a_loss_that_hardly_falls() -> None:
    """Only in a run from random weights, after the warm-up, once, and with no rate that nobody has tried."""
    draw = random.Random(0)
    still = [6.24 + draw.gauss(0, 0.02) - 0.0005 * at for at in range(150)]
    (words,) = told(LossWarnings(150, ORDERED, uniform_loss=6.24), still)
    assert "hardly fallen in 50 iterations: 6.26 at the start, 6.23 now" in words and "give 6.24" in words
    assert "--lr is too low" in words and not re.search(r"--lr \d", words)
    assert not told(LossWarnings(150, ORDERED), still), "of weights that were loaded nobody expects it"
    assert not told(LossWarnings(150, ORDERED, uniform_loss=6.24, warmup_samples=8 * 120), still), "it has just warmed up"
    assert len(told(LossWarnings(150, ORDERED, uniform_loss=6.24, warmup_samples=8 * 60), still)) == 1
    falls = [max(1.9, 6.24 - 0.03 * at) for at in range(150)]
    assert not told(LossWarnings(150, ORDERED, uniform_loss=6.24), falls)
    slowly = [6.24 - 0.004 * at for at in range(150)]
    assert not told(LossWarnings(150, ORDERED, uniform_loss=6.24), slowly)
    assert not told(LossWarnings(40, ORDERED, uniform_loss=6.24), still[:40]), "too short to say"


def test_a_validation_loss_far_above_training() -> None:
    """Each with the likely cause: the corpus is read again and again; a split in the order of the files; other data."""
    causes = (
        (ORDERED, 5000, "read 5 times"),
        (ORDERED, 3000, "--shuffle-seed"),
        (Corpus(1000, False), 3000, "differs from the training data"),
    )
    for corpus, tokens, cause in (*causes, (Corpus(None, False), 10**9, "differs from the training data")):
        watch = LossWarnings(1000, corpus)
        assert watch.check_evaluation(9.0, tokens) is None, "nothing to compare with"
        told(watch, [3.0] * 50)
        assert watch.check_evaluation(3.4, tokens) is None and watch.check_evaluation(2.0, tokens) is None
        words = watch.check_evaluation(3.6, tokens)
        assert words is not None and "3.60, is far above that of training, 3.00" in words and cause in words
        assert watch.check_evaluation(4.0, tokens) is None, "told once"
    watch = LossWarnings(1000, ORDERED)
    told(watch, [3.0] * 9)
    assert watch.check_evaluation(9.0, 3000) is None, "too few losses to compare with"
    told(watch, [2.0, 4.0] * 5)
    assert watch.check_evaluation(4.0, 3000) is None, "within the noise of the training loss"
    assert watch.check_evaluation(4.3, 3000) is not None
    watch = LossWarnings(1000, ORDERED)
    told(watch, [3.0] * 5 + [7.0] * 20)
    assert watch.check_evaluation(9.0, 3000) is None, "a loss that rises has another cause"


def test_learning_rates_of_published_runs_are_not_told() -> None:
    """Peak rates, parameters and tokens of GPT-3 (Brown et al. 2020, table 2.1), Llama (Touvron et al. 2023), MT-NLG, Llama 3."""
    published = [
        *((6e-4, 125e6, 300e9), (2e-4, 1.3e9, 300e9), (1.2e-4, 6.7e9, 300e9), (0.6e-4, 175e9, 300e9)),
        *((3e-4, 6.7e9, 1e12), (1.5e-4, 65e9, 1.4e12), (5e-5, 530e9, 270e9), (8e-5, 405e9, 15.6e12)),
    ]
    for rate, parameters, tokens in published:
        assert check_learning_rate(rate, 6 * parameters * tokens) is None
    assert get_usual_learning_rate(1e20) == pytest.approx(0.3118 * 10**-2.5)
    high, small = check_learning_rate(0.1, 1e20), check_learning_rate(1.0, 1e12)
    assert high is not None and "--lr 0.1 is 101 times above" in high and "try --lr 1e-03" in high and "diverge" in high
    assert small is not None and small.endswith("try a lower --lr"), "the rule comes from larger runs"
    assert check_learning_rate(1e-6, 1e20) is None, "whether a low rate is too low, the losses show"
    assert all(check_learning_rate(*each) is None for each in itertools.product((0.0,), (0.0, 1e20)))
