"""The frozen base LM theta_base: loss, generation and streaming under a modulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.config import BaseLMConfig, ModulationConfig, PromptFormat
from mac_rag.errors import ModelLoadError
from mac_rag.lm.architectures import architecture_of
from mac_rag.lm.batching import pad_rows
from mac_rag.lm.loading import list_of_layers, load_causal_lm
from mac_rag.lm.max_rule import MaxRuleEnsemble
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.nn.modulation import LMShape, Modulation, linear_names

# Last names of the linear layers that make queries and values, by default the targets of LoRA: in Llama, Mistral and
# Qwen; in BERT; and in GPT-2, GPT-NeoX and Phi-3, where one layer makes them all.
LORA_TARGETS = ("q_proj", "v_proj", "query", "value", "c_attn", "query_key_value", "qkv_proj")


class BaseLM(nn.Module):
    """A causal LM that answers under a modulation.

    Args:
        model: any transformers causal LM.
        tokenizer: its tokenizer, with a padding token.
        prompt_format: the templates of documents, questions and answers.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt_format: PromptFormat) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.architecture = architecture_of(model)
        self.prompts = PromptEncoder(tokenizer, prompt_format)
        model.get_output_embeddings().register_forward_pre_hook(_without_gaps)

    @classmethod
    def load(
        cls,
        config: BaseLMConfig,
        prompt_format: PromptFormat,
        device: torch.device,
        folder: Path | None = None,
        modulation: str | None = None,
    ) -> BaseLM:
        """Loads the LM, frozen and in evaluation mode; see `load_causal_lm` for the arguments and errors."""
        model, tokenizer = load_causal_lm(config, device, folder, modulation)
        return cls(model.requires_grad_(False).eval(), tokenizer, prompt_format)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states, keys and values; that of the embeddings, since quantised weights keep it."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def width(self) -> int:
        """D, the width of the LM's embeddings."""
        width: int = self.model.config.hidden_size
        return width

    @property
    def context_window(self) -> int:
        """Positions that prompt, prefix and answer share."""
        window: int = self.model.config.max_position_embeddings
        return window

    def shape(self, config: ModulationConfig) -> LMShape:
        """The sizes of this LM that a modulation network needs.

        Raises:
            ModelLoadError: for LoRA, when no module has one of the target names.
        """
        lm = self.model.config
        linears = linear_names(self.model, config.targets or LORA_TARGETS)
        if config.kind == "lora" and not linears:
            raise ModelLoadError(
                f"no linear module of {lm.model_type} is named {', '.join(config.targets or LORA_TARGETS)}; "
                "set modulation.targets"
            )
        return LMShape(
            layers=lm.num_hidden_layers,
            kv_heads=self.architecture.kv_heads(lm),
            head_width=getattr(lm, "head_dim", None) or lm.hidden_size // lm.num_attention_heads,
            width=lm.hidden_size,
            linears=linears,
            blocks=self._block_names(),
        )

    def _block_names(self) -> tuple[str, ...]:
        """Names of the decoder layers."""
        name, layers = list_of_layers(self.model)
        return tuple(f"{name}.{index}" for index in range(len(layers)))

    def answer_loss(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        modulation: Modulation | None,
        *,
        segment_ids: Sequence[Sequence[int]] | None = None,
        hidden: Sequence[Sequence[bool]] | None = None,
    ) -> Tensor:
        """Negative log-likelihood of the answers' tokens (the loss of equation 2), `[B]`: a sum for each answer.

        Args:
            prompts, answers: token ids of B rows.
            modulation: modulation of B rows; None for the LM alone.
            segment_ids: for an LM that takes segments, the segment of each prompt token, a number above 0 (see
                `mac_rag.lm.prefix_lm.prefix_mask`); None for prompts of one segment.
            hidden: for such an LM, True for prompt tokens that only their own segment sees; None for none.
        """
        logits = self.answer_logits(prompts, answers, modulation, segment_ids=segment_ids, hidden=hidden).float()
        targets = torch.tensor([token for answer in answers for token in answer], device=self.device)
        losses = functional.cross_entropy(logits, targets, reduction="none")
        return torch.stack([row.sum() for row in losses.split([len(answer) for answer in answers])])

    def answer_logits(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        modulation: Modulation | None,
        *,
        segment_ids: Sequence[Sequence[int]] | None = None,
        hidden: Sequence[Sequence[bool]] | None = None,
    ) -> Tensor:
        """The logits that predict each token of the answers, row after row: `[N, vocabulary]`.

        Args:
            prompts, answers, modulation, segment_ids, hidden: as `answer_loss` takes them; N is the number of tokens of
                all answers.
        """
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        longest = max(map(len, answers))
        ids, mask, positions = self._padded(rows, modulation)
        is_answer = torch.zeros(len(rows), longest, dtype=torch.bool, device=self.device)
        for row, answer in zip(is_answer, answers, strict=True):
            row[longest - len(answer) :] = True
        behind = [len(answer) for answer in answers]
        segments = self._padded_prompts(segment_ids or [[1] * len(prompt) for prompt in prompts], behind, ids)
        hidden_tokens = None if hidden is None else self._padded_prompts(hidden, behind, ids).bool()
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": modulation.cache(self.dtype) if modulation else None,
            **self.architecture.segment_arguments(segments, hidden_tokens),
        }
        with _attached(modulation, self.model):
            if self.architecture.linear_head:
                states = self.model.base_model(**inputs).last_hidden_state[:, -longest - 1 : -1]
                logits: Tensor = self.model.get_output_embeddings()(states[is_answer])
            else:
                logits = self.model(**inputs, logits_to_keep=longest + 1).logits[:, :-1][is_answer]
        return logits

    def _padded_prompts(self, values: Sequence[Sequence[int]], behind: Sequence[int], ids: Tensor) -> Tensor:
        """One value for each prompt token, and 0 for padding and answers: `[B, L]` as the ids.

        Args:
            values: a value for each token of the prompts of B rows.
            behind: tokens behind each prompt.
            ids: `[B, L]`, prompts and answers padded on the left.
        """
        padded = torch.zeros_like(ids)
        for row, prompt, count in zip(padded, values, behind, strict=True):
            end = len(row) - count
            row[end - len(prompt) : end] = torch.tensor(prompt)
        return padded

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        modulation: Modulation | None,
        *,
        max_new_tokens: int,
        num_beams: int = 1,
        weights: Sequence[float] | None = None,
    ) -> list[str]:
        """Answers a batch of prompts, greedily or with beams.

        Args:
            prompts: token ids of B rows.
            modulation: modulation of B rows; None for the LM alone.
            max_new_tokens: longest answer, in tokens.
            num_beams: 1 is greedy.
            weights: memory weight of each row for max-rule ensemble decoding (see `MaxRuleEnsemble`); None decodes with
                the modulation only.
        """
        count = len(prompts)
        prompts, modulation, ensemble = _with_and_without(prompts, modulation, weights)
        ids, mask, _ = self._padded(prompts, modulation)
        with _attached(modulation, self.model):
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=modulation.cache(self.dtype, num_beams) if modulation else None,
                max_new_tokens=max_new_tokens,
                num_beams=num_beams,
                do_sample=False,
                logits_processor=[ensemble] if ensemble else [],
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
            )
        texts: list[str] = self.tokenizer.batch_decode(output[:count, ids.shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]

    @torch.no_grad()
    def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        modulation: Modulation,
        *,
        max_new_tokens: int,
        weights: Sequence[float],
    ) -> list[list[str]]:
        """Answers a batch of prompts greedily at each of several memory weights; all weights share the prompts' cache.

        Args:
            prompts: token ids of B rows.
            modulation: modulation of B rows.
            max_new_tokens: longest answer, in tokens.
            weights: memory weights, from 0 (the LM alone) to 1 (see `MaxRuleEnsemble`).

        Returns:
            For each weight B answers, those that `generate` gives at this weight.
        """
        rows = len(prompts) * len(weights)
        steps = self._greedy(prompts, modulation, list(weights) * len(prompts), copies=len(weights))
        ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        generated: list[Tensor] = []
        while len(generated) < max_new_tokens and not ended.all():
            generated.append(next(steps)[:rows].masked_fill(ended, self.tokenizer.pad_token_id))
            ended |= generated[-1] == self.tokenizer.eos_token_id
        texts = self.tokenizer.batch_decode(torch.stack(generated, 1), skip_special_tokens=True)
        return [[text.strip() for text in texts[first :: len(weights)]] for first in range(len(weights))]

    @torch.no_grad()
    def stream(
        self,
        prompt: Sequence[int],
        modulation: Modulation | None,
        *,
        max_new_tokens: int,
        weights: Sequence[float] | None = None,
    ) -> Iterator[str]:
        """Yields the greedy answer to one prompt piece by piece. Joined, the pieces are what `generate` returns."""
        generated: list[int] = []
        sent = ""
        for tokens in islice(self._greedy([prompt], modulation, weights), max_new_tokens):
            token = int(tokens[0])
            if token == self.tokenizer.eos_token_id:
                break
            generated.append(token)
            text = self.tokenizer.decode(generated, skip_special_tokens=True).lstrip()
            # A character may need several tokens, and a space at the end may prove to be the end of the answer.
            whole = text.rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
            if len(whole) > len(sent):
                yield whole[len(sent) :]
                sent = whole
        rest: str = self.tokenizer.decode(generated, skip_special_tokens=True).strip()[len(sent) :]
        if rest:
            yield rest

    def _greedy(
        self,
        prompts: Sequence[Sequence[int]],
        modulation: Modulation | None,
        weights: Sequence[float] | None,
        copies: int = 1,
    ) -> Iterator[Tensor]:
        """Greedy decoding, unbounded: yields next tokens `[B]`, or `[2B]` when decoding with and without memory.

        The halves of `[2B]` are equal. With copies, B counts all copies.

        Args:
            prompts: token ids of the rows.
            modulation: modulation of the rows; None for the LM alone.
            weights: memory weights as `generate` takes them, one for each copy of each row.
            copies: copies of each row, one behind the other. They share the pass over the prompt.
        """
        prompts, modulation, ensemble = _with_and_without(prompts, modulation, weights)
        ids, mask, positions = self._padded(prompts, modulation)
        cache = modulation.cache(self.dtype) if modulation else None
        segments = self.architecture.segment_arguments(torch.ones_like(ids))
        while True:
            with _attached(modulation, self.model):
                output = self.model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                    **segments,
                )
            cache, logits = output.past_key_values, output.logits[:, -1]
            if copies > 1:
                places = torch.arange(len(ids), device=self.device).repeat_interleave(copies)
                cache.reorder_cache(places)  # which every kind of layer can do
                logits, mask, positions = (part[places] for part in (logits, mask, positions))
                copies = 1
            tokens = (ensemble(ids, logits) if ensemble else logits).argmax(-1)
            yield tokens
            ids = tokens[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            positions = positions[:, -1:] + 1
            segments = {}

    def _padded(self, rows: Sequence[Sequence[int]], modulation: Modulation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Pads rows on the left: ids `[B, L]`, attention mask `[B, P + L]` with the prefix, and positions `[B, L]`."""
        ids, mask = pad_rows(rows, self.tokenizer.pad_token_id, self.device, "left")
        if modulation:
            mask = torch.cat([modulation.prefix_mask(mask), mask], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return ids, mask, positions


def _with_and_without(
    prompts: Sequence[Sequence[int]], modulation: Modulation | None, weights: Sequence[float] | None
) -> tuple[Sequence[Sequence[int]], Modulation | None, MaxRuleEnsemble | None]:
    """For an ensemble: 2B rows, the second half without modulation, and what combines the halves.

    Without weights, or without a modulation, rows and modulation stay as they are.
    """
    if modulation is None or weights is None:
        return prompts, modulation, None
    return [*prompts, *prompts], modulation.beside_none(), MaxRuleEnsemble(weights)


def _attached(modulation: Modulation | None, model: nn.Module) -> Any:
    return modulation.attached(model) if modulation else nullcontext()


def _without_gaps(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies the states that an LM's head reads, if they have gaps, as the last token of each row of a batch has.

    The matrix product would take such rows one by one, and read the head's weights for each.
    """
    return tuple(tensor.contiguous() for tensor in inputs)
