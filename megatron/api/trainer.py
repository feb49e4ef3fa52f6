"""The trainer of programs and notebooks."""

from __future__ import annotations

from megatron.data.tokenizers.simple_tokenizers import Tokenizer
from megatron.data.tokenizers.tokenizer import build_tokenizer
from megatron.training import trainer
from megatron_lab.inference.language_model import LanguageModel


class Trainer(trainer.Trainer):
    __doc__ = trainer.Trainer.__doc__

    def language_model(self, tokenizer: Tokenizer | None = None) -> LanguageModel:
        """The model as it is now, for logits and texts. It has the trainer's weights, not a copy of them.

        Args:
            tokenizer: by default that of the settings.

        Raises:
            ValueError: this layout keeps no whole weights, or cuts sequences: save, and take `LanguageModel.load`.
        """
        self.steps.finish_publishing()
        parallel = self.config.parallel
        if parallel.sharding == "optim_grads_params" or self.model.sequence_parallel or self.context.topology.cp > 1:
            raise ValueError(
                "a model with --sequence-parallel, context ranks or optim_grads_params is made for whole sequences in training: "
                "save it, and take LanguageModel.load"
            )
        return LanguageModel(self.model, self.context, tokenizer or build_tokenizer(self.config.data))
