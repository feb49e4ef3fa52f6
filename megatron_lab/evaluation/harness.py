"""A model as lm-evaluation-harness sees one: an `LM` that it asks for likelihoods and texts.

The interface is that of `lm_eval.api.model.LM` of version 0.4: requests have `args`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.config.extras import optional
from megatron.data.tokenizer import Tokenizer
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron_lab.evaluation.scores import Scorer
from megatron_lab.evaluation.texts import begins_with
from megatron_lab.inference.continuation import continuations
from megatron_lab.inference.generate import GenerationRequest, Sampling

_NEW_TOKENS = 256
"""Most tokens of an answer where a task does not say."""


class Answers:
    """What the harness may ask of a model. `harness_model` makes an `LM` of it.

    All ranks of the model get the same requests in the same order and answer together.
    """

    def __init__(self, model: Model, context: ParallelContext, tokenizer: Tokenizer, scorer: Scorer) -> None:
        self.model, self.context, self.words, self.scorer = model, context, tokenizer, scorer

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log-probability of the continuation, and whether it is the likeliest."""
        pairs = [self._encoded(*request.args) for request in requests]
        return [(score.total, score.greedy) for score in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Of each text: log-probability of the whole of it."""
        before = begins_with(self.words)
        texts = [([*before, *self.words.encode(request.args[0])], 1) for request in requests]
        return [score.total for score in self.scorer.score(texts)]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Of each (context, settings): the text that follows, up to the first of the texts `until`."""
        return [self._answer(*request.args) for request in requests]

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], int]:
        """The tokens of both, and where the continuation begins. Blanks at the end of the context go to the continuation, since a
        token may hold a blank and the word behind it."""
        if not context:
            before = begins_with(self.words)
            return [*before, *self.words.encode(continuation)], len(before)
        bare = context.rstrip()
        start = self.words.encode(bare) if bare else begins_with(self.words)
        whole = self.words.encode(context + continuation)
        if whole[: len(start)] == start and len(whole) > len(start) > 0:
            return whole, len(start)
        ids = self.words.encode(context[len(bare) :] + continuation)
        return [*start, *ids], len(start)

    def _answer(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else until
        new = int(settings.get("max_gen_toks", _NEW_TOKENS))
        ids = self.words.encode(context) or begins_with(self.words)
        config = self.model.config
        if config.position_embedding_type == "learned_absolute":
            new = max(1, min(new, config.num_positions - 1))
            ids = ids[-(config.num_positions - new) :]
        warm = settings.get("do_sample", False) and settings.get("temperature", 1.0) > 0
        sampling = (
            Sampling(settings.get("temperature", 1.0), settings.get("top_k"), settings.get("top_p", 1.0)) if warm else Sampling(0)
        )
        request = GenerationRequest([ids], new, sampling, eod=self.words.eod, num_ids=self.words.vocab_size)
        text = continuations(self.model, self.context, self.words, request)[0].text
        return text[: min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=len(text))]


def harness_model(answers: Answers) -> Any:
    """The model as an `LM` of the harness.

    Raises:
        ValueError: the harness is not installed.
    """
    base: Any = optional("lm_eval.api.model", "--tasks needs lm-evaluation-harness").LM

    class AsHarnessModel(Answers, base):  # type: ignore[misc]
        """Its answers, behind the harness's own interface."""

        def __init__(self) -> None:
            base.__init__(self)
            Answers.__init__(self, *vars(answers).values())

        @property
        def tokenizer_name(self) -> str:
            return type(answers.words).__name__

    return AsHarnessModel()


def run_tasks(
    answers: Answers, tasks: Sequence[str], *, num_fewshot: int | None, limit: int | None, include_path: str | None
) -> dict[str, Any]:
    """Run tasks of the harness; returns its results in JSON types.

    Args:
        include_path: folder with tasks of one's own.

    Raises:
        ValueError: the harness is not installed, or does not know a task.
    """
    model = harness_model(answers)
    harness = optional("lm_eval", "--tasks needs lm-evaluation-harness")
    manager = optional("lm_eval.tasks", "--tasks needs lm-evaluation-harness").TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise ValueError(f"--tasks: lm-evaluation-harness knows no {', '.join(unknown)} (--include-path names a folder of more)")
    found = harness.simple_evaluate(
        model, tasks=[*tasks], num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=0
    )
    results: dict[str, Any] = json.loads(json.dumps(found["results"], default=str))
    return results
