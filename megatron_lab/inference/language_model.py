"""A model with its tokenizer: logits of texts, and texts that go on with others. All ranks of the model call it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from megatron.checkpoint.storage import Place
from megatron.config.data import DataConfig
from megatron.config.parallel import ParallelConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext, connect, disconnect
from megatron_lab.foreign.opening import open_source
from megatron_lab.inference.continuation import Continuation, continuations, most_new_tokens, prompt_ids
from megatron_lab.inference.forward import sequence_logits
from megatron_lab.inference.generate import GenerationRequest, Sampling, check_request
from megatron_lab.inference.model_from_source import model_from, usual_dtype


class LanguageModel:
    """A model with its tokenizer."""

    def __init__(self, model: Model, context: ParallelContext, tokenizer: Tokenizer) -> None:
        self.model, self.context, self.tokenizer = model, context, tokenizer
        self._joined = False

    @classmethod
    def load(
        cls,
        folder: Place,
        *,
        step: int | None = None,
        average: bool = False,
        tokenizer: DataConfig | None = None,
        dtype: torch.dtype | None = None,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008 (frozen)
    ) -> LanguageModel:
        """The model in a folder: a --save folder or a checkpoint in it, a Hugging Face folder, or one of Megatron-LM.

        Args:
            step: the iteration to take from a folder that holds several; by default the newest.
            average: take the moving average of the weights (--ema-decay).
            tokenizer: settings that name it; by default the folder does.
            dtype: of weights and products; by default as stored, but float32 for float16 on a CPU.
            parallel: device and layout; by default one process.

        Raises:
            ValueError: there is no such model, no tokenizer is known, or the layout cannot hold it.
        """
        source = open_source(folder, step, average=average)
        settings = tokenizer or source.tokenizer
        if settings is None or settings.tokenizer_type is None:
            raise ValueError(f"no tokenizer is known of {folder}: name one (DataConfig with tokenizer_type and its files)")
        made = build_tokenizer(settings)
        context = connect(parallel)
        found = cls(model_from(source, context, dtype or usual_dtype(source, context)), context, made)
        found._joined = True
        return found

    def logits(self, text: str | Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
        """Logits of the next token at every position, [b, s, v] in the model's dtype, on every rank.

        Args:
            text: one text (b is 1), or ids [b, s].
        """
        ids = [prompt_ids(self.tokenizer, text)] if isinstance(text, str) else text
        return sequence_logits(self.model, self.context, torch.as_tensor(ids))

    def generate(
        self,
        prompt: str,
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        say: Callable[[str], None] | None = None,
    ) -> str:
        """A text that goes on with the prompt, without the prompt itself.

        Args:
            sampling: how tokens are chosen; `Sampling(temperature=0)` takes the likeliest.
            say: called with the text piece by piece, as it is made.

        Raises:
            ValueError: the model has learned fewer positions than prompt and new tokens take.
        """
        (found,) = self.continuations([prompt], max_new_tokens, sampling=sampling, say=say)
        return found.text

    def continuations(
        self,
        prompts: Sequence[str],
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        num_samples: int = 1,
        ends: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> list[Continuation]:
        """Texts that go on with several prompts, worked off at once; prompt by prompt, samples of a prompt side by side.

        Args:
            num_samples: texts for each prompt.
            ends: stop at the end of a document.
            say: called with the first text piece by piece.

        Raises:
            ValueError: as `generate`.
        """
        ids = [prompt_ids(self.tokenizer, prompt) for prompt in prompts]
        request = GenerationRequest(
            ids,
            max_new_tokens or most_new_tokens(self.model.config, ids),
            sampling,
            num_samples=num_samples,
            eod=self.tokenizer.eod if ends else None,
            num_ids=self.tokenizer.vocab_size,
        )
        check_request(self.model, request)
        return continuations(self.model, self.context, self.tokenizer, request, say)

    def close(self) -> None:
        """Leave the job, if this model has joined it."""
        if self._joined:
            disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
