"""Pretraining of a T5, from which MAC's text encoders can start, on the sequences of a causal LM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

from pipelines.tasks.pretrain import PretrainConfig, PretrainTask


class PretrainT5Task(PretrainTask):
    """The encoder reads the first half of each sequence, and the decoder predicts the second half.

    This is the prefix LM objective of Raffel et al. (2020, "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer", section 3.3.1), with every cut in the middle. Validation is perplexity alone.
    """

    def __init__(self, config: PretrainConfig, output: Path) -> None:
        super().__init__(config, output)
        self._asked = None

    def network(self) -> Any:
        sizes = self.config.lm
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=len(self.tokenizer),
                d_model=sizes.hidden_size,
                d_kv=sizes.hidden_size // sizes.heads,
                d_ff=sizes.intermediate_size,
                num_layers=sizes.layers,
                num_heads=sizes.heads,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
            )
        )

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        ids, targets = super()._padded(rows)
        targets[:, : ids.shape[1] // 2] = -100
        return ids, targets

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        half = ids.shape[1] // 2
        text, continuation = ids[:, :half], ids[:, half:]
        pad = self.lm.config.pad_token_id
        embed = self.lm.get_input_embeddings()
        logits = (
            self._scale
            * self.lm(
                inputs_embeds=self._scale * embed(text),
                attention_mask=(text != pad).long(),
                decoder_inputs_embeds=self._scale * embed(functional.pad(continuation[:, :-1], (1, 0), value=pad)),
                use_cache=False,
            ).logits
        )
        losses = functional.cross_entropy(logits.float().transpose(1, 2), targets[:, half:], reduction="none")
        return functional.pad(losses, (half - 1, 0))

    @property
    def _scale(self) -> float:
        """Factor from the learned embeddings to T5's, which have a norm of the square root of the width.

        T5 divides by it again before the output layer, which is tied to the embeddings. Adam's steps have one size for
        all weights: embeddings as large as T5's would hardly change.
        """
        return float(self.config.lm.hidden_size**0.5)

    def save(self, folder: Path) -> None:
        weight = self.lm.get_input_embeddings().weight
        learned = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(self._scale)
            super().save(folder)
            weight.copy_(learned)

    def speed(self, examples: float) -> dict[str, float]:
        # Each token passes one of two stacks, so a causal LM's share of the chip's peak would be wrong.
        return {"tokens_per_second": examples * self.config.corpus.sequence_length}
