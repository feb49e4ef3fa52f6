"""A model with its tokenizer: logits of texts, and text generation. All ranks of the model call its methods together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from megatron.checkpoint.storage import PathOrUrl
from megatron.config.data import DataConfig
from megatron.config.parallel import ParallelConfig
from megatron.data.tokenizer import Tokenizer
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext, connect, disconnect
from megatron_lab.foreign.open_source import open_source
from megatron_lab.inference.continuation import (
    DEFAULT_ANSWER_TOKENS,
    Continuation,
    encode_prompt,
    generate_texts,
    select_max_new_tokens,
)
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.generate import GenerationRequest, Sampling, check_request
from megatron_lab.inference.model_from_source import load_model, select_default_dtype
from megatron_lab.tokenizers.embedding_rows import fit_tokenizer
from megatron_lab.tokenizers.stop_ids import find_stop_ids

if TYPE_CHECKING:
    from megatron_lab.inference.chat_format import ChatFormat
    from megatron_lab.inference.session import GenerationSession


class LanguageModel:
    """Trained model with its tokenizer. It computes logits of texts and generates texts."""

    def __init__(self, model: Model, context: ParallelContext, tokenizer: Tokenizer) -> None:
        self.model, self.context, self.tokenizer = model, context, tokenizer
        self._must_disconnect = False
        self._session: GenerationSession | None = None
        self._chat_formats: dict[str | None, ChatFormat] = {}

    @classmethod
    def load(
        cls,
        folder: PathOrUrl,
        *,
        step: int | None = None,
        average: bool = False,
        tokenizer: DataConfig | None = None,
        dtype: torch.dtype | None = None,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008 (frozen)
    ) -> LanguageModel:
        """Load the model of a folder: a --save folder, one checkpoint in it, a Hugging Face folder or a folder of Megatron-LM.

        Args:
            step: iteration to load from a folder with several checkpoints; by default the newest.
            average: load the moving average of the weights (--ema-decay) instead of the weights.
            tokenizer: settings of the tokenizer; by default those of the folder.
            dtype: dtype of weights and matrix products; by default the stored dtype, but float32 instead of float16 on a CPU.
            parallel: device and parallel sizes; by default one process.

        Raises:
            ValueError: the folder has no model, its tokenizer is unknown, or the layout cannot split the model.
        """
        source = open_source(folder, step, average=average)
        tokenizer_config = tokenizer or source.tokenizer
        if tokenizer_config is None or tokenizer_config.tokenizer_type is None:
            raise ValueError(
                f"the tokenizer of {folder} is unknown: pass `tokenizer`, a DataConfig with tokenizer_type and its files"
            )
        _, built_tokenizer = fit_tokenizer(tokenizer_config, source.vocab_size, str(folder))
        context = connect(parallel)
        language_model = cls(load_model(source, context, dtype or select_default_dtype(source, context)), context, built_tokenizer)
        language_model._must_disconnect = True
        return language_model

    def logits(self, text: str | Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at every position, on every rank.

        Args:
            text: one text, or token ids [b, s] of b sequences with s tokens each.

        Returns:
            Logits [b, s, v] in the model's dtype, where v is the vocabulary size. For one text, b is 1.
        """
        ids = [encode_prompt(self.tokenizer, text)] if isinstance(text, str) else text
        return compute_sequence_logits(self.model, self.context, torch.as_tensor(ids))

    def generate(
        self,
        prompt: str,
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Generate text that continues a prompt. Return the new text without the prompt.

        Args:
            max_new_tokens: limit on generated tokens; by default 256, or fewer if the model has learned fewer positions.
            sampling: how tokens are selected; `Sampling(temperature=0)` always selects the most likely token.
            on_text: called with each new text while it is generated.

        Raises:
            ValueError: prompt and new tokens exceed the positions that the model has learned.
        """
        (continuation,) = self.generate_batch([prompt], max_new_tokens, sampling=sampling, on_text=on_text)
        return continuation.text

    def generate_batch(
        self,
        prompts: Sequence[str],
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        num_samples: int = 1,
        stop_at_eod: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Continuation]:
        """Generate texts that continue several prompts, in one batch.

        Args:
            max_new_tokens: limit on generated tokens of each text; by default 256, or fewer if the model has learned fewer
                positions.
            sampling: how tokens are selected; `Sampling(temperature=0)` always selects the most likely token.
            num_samples: number of texts for each prompt.
            stop_at_eod: end a text at the end-of-document token, and at the other tokens that end a text according to the files of
                a Hugging Face model.
            on_text: called with each new text of the first sequence while it is generated.

        Returns:
            The texts in the order of the prompts. The samples of a prompt are next to each other.

        Raises:
            ValueError: prompt and new tokens exceed the positions that the model has learned.
        """
        ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        request = GenerationRequest(
            ids,
            max_new_tokens or select_max_new_tokens(self.model.config, ids),
            sampling,
            num_samples=num_samples,
            stop_ids=find_stop_ids(self.tokenizer) if stop_at_eod else frozenset(),
            num_ids=self.tokenizer.vocab_size,
        )
        check_request(self.model, request)
        return generate_texts(self.model, self.context, self.tokenizer, request, on_text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Generate the next answer of a conversation, in the chat template of the tokenizer.

        A model from `load` keeps the key-value cache. If the conversation of the next call begins like this one, that call need not
        process the common tokens again.

        Args:
            messages: messages so far, such as {"role": "user", "content": "hello"}, the oldest first.
            max_new_tokens: limit on generated tokens; by default as many as the context has room for, but at most 1,024.
            sampling: how tokens are selected; `Sampling(temperature=0)` always selects the most likely token.
            chat_template: file of another template (jinja), or the name of a built-in one (chatml).
            tools: tools that the model may call, as JSON schemas; None for none.
            documents: documents that the template writes for the model; None for none.
            chat_template_kwargs: further variables of the template, such as `{"enable_thinking": False}`.
            on_text: called with each new text while it is generated.

        Returns:
            The answer, without the token that ends it.

        Raises:
            ValueError: the tokenizer has no template, the template refuses the messages, or they do not fit in the context.
        """
        from megatron_lab.inference.chat_format import ChatFormat
        from megatron_lab.inference.dialogue import AnswerStream
        from megatron_lab.inference.session import GenerationSession

        if chat_template not in self._chat_formats:
            self._chat_formats[chat_template] = ChatFormat(self.tokenizer, chat_template)
        chat_format = self._chat_formats[chat_template]
        if self._session is None or not self._must_disconnect:  # a trainer may have changed the weights since the last call
            self._session = GenerationSession(self.model, self.context)
        prompt = chat_format.encode([dict(message) for message in messages], tools, documents, chat_template_kwargs)
        num_free = self._session.num_positions - len(prompt)
        if num_free < 1:
            raise ValueError(
                f"the conversation has {len(prompt):,} tokens, but the context of the model only {self._session.num_positions:,}: "
                "leave out the oldest messages"
            )
        request = GenerationRequest(
            [prompt],
            min(max_new_tokens or DEFAULT_ANSWER_TOKENS, num_free),
            sampling,
            stop_ids=chat_format.stop_ids,
            num_ids=self.tokenizer.vocab_size,
            first_prompt=len(messages),
        )
        stream = AnswerStream(self.tokenizer, prompt, chat_format.stop_text, on_text or (lambda _: None))
        for id in self._session.generate(request, lambda: stream.has_ended):
            stream.add(id)
        return stream.finish().text

    def close(self) -> None:
        """Destroy the process groups, if `load` has created them."""
        if self._must_disconnect:
            disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
