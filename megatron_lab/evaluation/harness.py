"""Adapter with which lm-evaluation-harness evaluates a model: it scores texts by their likelihood and generates texts.

The harness defines the interface in `lm_eval.api.model.LM` (version 0.4). It passes requests, whose arguments are the tuple `args`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.config.optional_packages import import_optional
from megatron.data.tokenizer import Tokenizer
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron_lab.evaluation.scores import Scorer
from megatron_lab.evaluation.texts import get_document_prefix
from megatron_lab.inference.continuation import generate_texts
from megatron_lab.inference.generate import GenerationRequest, Sampling

_DEFAULT_MAX_NEW_TOKENS = 256
"""Limit on the tokens of an answer, for tasks that do not set `max_gen_toks`."""


class HarnessModel:
    """Model of this framework with the methods that lm-evaluation-harness calls (its interface `LM`).

    This class does not import the harness. `build_harness_lm` makes an instance of `LM` from it.

    All ranks of the model get the same requests in the same order and call the methods together.
    """

    def __init__(self, model: Model, context: ParallelContext, tokenizer: Tokenizer, scorer: Scorer) -> None:
        self.model, self.context, self.text_tokenizer, self.scorer = model, context, tokenizer, scorer

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Score the continuation of each request's context.

        Args:
            requests: requests of the harness, each with `args` (context, continuation).

        Returns:
            For each request, the log-probability of the continuation, and whether greedy decoding would produce it.
        """
        pairs = [self._encode_pair(*request.args) for request in requests]
        return [(score.total, score.is_greedy) for score in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-probability of the complete text of each request.

        Args:
            requests: requests of the harness, each with `args` (text,).
        """
        prefix = get_document_prefix(self.text_tokenizer)
        sequences = [([*prefix, *self._encode_segment(request.args[0])], len(prefix)) for request in requests]
        return [score.total for score in self.scorer.score(sequences)]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Generate an answer to each request. The answer ends before the first stop text.

        Args:
            requests: requests of the harness, each with `args` (context, generation settings). The setting `until` lists the stop
                texts.
        """
        return [self._generate(*request.args) for request in requests]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return the token ids of the context and its continuation, and the index of the continuation's first token.

        Spaces at the end of the context are encoded with the continuation, because a token often contains a space and the word
        after it.
        """
        if not context:
            prefix = get_document_prefix(self.text_tokenizer)
            return [*prefix, *self._encode_segment(continuation)], len(prefix)
        stripped_context = context.rstrip()
        context_ids = self.text_tokenizer.encode(stripped_context) if stripped_context else get_document_prefix(self.text_tokenizer)
        joint_ids = self.text_tokenizer.encode(context + continuation)
        if joint_ids[: len(context_ids)] == context_ids and len(joint_ids) > len(context_ids) > 0:
            return joint_ids, len(context_ids)
        continuation_ids = self._encode_segment(context[len(stripped_context) :] + continuation)
        return [*context_ids, *continuation_ids], len(context_ids)

    def _encode_segment(self, text: str) -> list[int]:
        """Return the token ids of a text that does not start a document."""
        ids: list[int] = self.text_tokenizer.encode_segment(text).tolist()
        return ids

    def _generate(self, context: str, gen_kwargs: dict[str, Any]) -> str:
        stop_texts = gen_kwargs.get("until") or []
        stop_texts = [stop_texts] if isinstance(stop_texts, str) else stop_texts
        max_new_tokens = int(gen_kwargs.get("max_gen_toks", _DEFAULT_MAX_NEW_TOKENS))
        ids = self.text_tokenizer.encode(context) or get_document_prefix(self.text_tokenizer)
        config = self.model.config
        if config.position_embedding_type == "learned_absolute":
            max_new_tokens = max(1, min(max_new_tokens, config.num_positions - 1))
            ids = ids[-(config.num_positions - max_new_tokens) :]
        uses_sampling = gen_kwargs.get("do_sample", False) and gen_kwargs.get("temperature", 1.0) > 0
        sampling = (
            Sampling(gen_kwargs.get("temperature", 1.0), gen_kwargs.get("top_k"), gen_kwargs.get("top_p", 1.0))
            if uses_sampling
            else Sampling(0)
        )
        request = GenerationRequest(
            [ids], max_new_tokens, sampling, eod=self.text_tokenizer.eod, num_ids=self.text_tokenizer.vocab_size
        )
        text = generate_texts(self.model, self.context, self.text_tokenizer, request)[0].text
        return text[: min((position for stop in stop_texts if stop and (position := text.find(stop)) >= 0), default=len(text))]


def build_harness_lm(model: HarnessModel) -> Any:
    """Return a model as an instance of the `LM` class of lm-evaluation-harness. Only this function imports that class.

    Raises:
        ValueError: lm-evaluation-harness is not installed.
    """
    base: Any = import_optional("lm_eval.api.model", "--tasks needs lm-evaluation-harness").LM

    class HarnessLM(HarnessModel, base):  # type: ignore[misc]
        """Class that has the methods of `HarnessModel` and is a subclass of the harness's `LM`. It is defined within the function,
        because its base class `LM` exists only if lm-evaluation-harness is installed."""

        def __init__(self) -> None:
            base.__init__(self)
            HarnessModel.__init__(self, *vars(model).values())

        @property
        def tokenizer_name(self) -> str:
            return type(model.text_tokenizer).__name__

    return HarnessLM()


def run_tasks(
    harness_model: HarnessModel, tasks: Sequence[str], *, num_fewshot: int | None, limit: int | None, include_path: str | None
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness on a model.

    Args:
        tasks: names of tasks, or patterns of names.
        num_fewshot: number of examples in the prompt; None for the default of each task.
        limit: maximum number of requests per task; None for all.
        include_path: folder with the user's own tasks.

    Returns:
        The harness's dict `results` (the metrics of each task, by its name), in JSON types.

    Raises:
        ValueError: the harness is not installed, or has no task with one of the names.
    """
    lm = build_harness_lm(harness_model)
    harness = import_optional("lm_eval", "--tasks needs lm-evaluation-harness")
    manager = import_optional("lm_eval.tasks", "--tasks needs lm-evaluation-harness").TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise ValueError(
            f"--tasks: lm-evaluation-harness has no task {', '.join(unknown)}. Correct the name, or add a folder with task files "
            "by --include-path"
        )
    output = harness.simple_evaluate(
        lm, tasks=[*tasks], num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=0
    )
    results: dict[str, Any] = json.loads(json.dumps(output["results"], default=str))
    return results
