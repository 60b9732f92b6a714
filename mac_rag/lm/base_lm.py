"""The frozen base LM theta_base: losses, generation and streaming under a modulation."""

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
from mac_rag.lm.loading import list_of_layers, load_causal_lm
from mac_rag.lm.max_rule import SurerReading
from mac_rag.lm.prefix_lm import PrefixLMConfig, parts_argument
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.nn.modulation import LMShape, Modulation, linear_names

# Last names of the linear layers that make queries and values: of Llama, Mistral, Qwen; of BERT; of GPT-2, in one.
LORA_TARGETS = ("q_proj", "v_proj", "query", "value", "c_attn", "query_key_value")

# LMs whose logits are one linear layer on their last states: only those of the answers' tokens are computed.
_PLAIN_HEADS = {"gpt2", "llama", "mistral", "qwen2", "qwen3", PrefixLMConfig.model_type}


class BaseLM(nn.Module):
    """A causal LM that answers under a modulation.

    Args:
        model: any transformers causal LM.
        tokenizer: its tokenizer, with a padding token.
        prompt_format: how questions and documents are written for it.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt_format: PromptFormat) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = PromptEncoder(tokenizer, prompt_format)

    @classmethod
    def load(
        cls, config: BaseLMConfig, prompt_format: PromptFormat, device: torch.device, folder: Path | None = None
    ) -> BaseLM:
        """Loads the LM, frozen and in evaluation mode; see `load_causal_lm` for the errors."""
        model, tokenizer = load_causal_lm(config, device, folder)
        return cls(model.requires_grad_(False).eval(), tokenizer, prompt_format)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

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
        """What a modulation network must know of this LM.

        Raises:
            ModelLoadError: when no module has one of LoRA's target names.
        """
        lm = self.model.config
        heads: int = lm.num_attention_heads
        linears = linear_names(self.model, config.targets or LORA_TARGETS)
        if config.kind == "lora" and not linears:
            raise ModelLoadError(
                f"no linear module of {lm.model_type} is named {', '.join(config.targets or LORA_TARGETS)}; "
                "set modulation.targets"
            )
        return LMShape(
            layers=lm.num_hidden_layers,
            kv_heads=getattr(lm, "num_key_value_heads", None) or heads,
            head_width=getattr(lm, "head_dim", None) or lm.hidden_size // heads,
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
        parts: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Negative log-likelihood of the answers' tokens (the loss of equation 2), `[B]`: a sum for each answer.

        Args:
            prompts, answers: token ids of B rows.
            modulation: of B rows, or None for the LM alone.
            parts: of a prefix LM, numbers that say which tokens of each prompt see each other both ways (see
                `prefix_mask`); None for prompts of one part.
        """
        logits = self.answer_logits(prompts, answers, modulation, parts=parts).float()
        targets = torch.tensor([token for answer in answers for token in answer], device=self.device)
        losses = functional.cross_entropy(logits, targets, reduction="none")
        return torch.stack([row.sum() for row in losses.split([len(answer) for answer in answers])])

    def answer_logits(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        modulation: Modulation | None,
        *,
        parts: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """What the LM expects in the place of each token of the answers, row after row: `[N, vocabulary]`.

        Args:
            prompts, answers, modulation, parts: as `answer_loss` takes them; N is the number of tokens of all answers.
        """
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        kept = max(map(len, answers))
        ids, mask, positions = self._padded(rows, modulation)
        numbers = torch.zeros_like(ids)
        wanted = torch.zeros(len(rows), kept, dtype=torch.bool, device=self.device)
        columns = zip(numbers, wanted, parts or [[1] * len(p) for p in prompts], answers, strict=True)
        for row, predicted, number, answer in columns:
            end = len(row) - len(answer)
            row[end - len(number) : end] = torch.tensor(number)
            predicted[kept - len(answer) :] = True
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": modulation.cache() if modulation else None,
            **parts_argument(self.model, numbers),
        }
        with _attached(modulation, self.model):
            if self.model.config.model_type in _PLAIN_HEADS:
                states = self.model.base_model(**inputs).last_hidden_state[:, -kept - 1 : -1]
                logits: Tensor = self.model.get_output_embeddings()(states[wanted])
            else:
                logits = self.model(**inputs, logits_to_keep=kept + 1).logits[:, :-1][wanted]
        return logits

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
        """Answers a batch of prompts, greedily or with beams, with the key-value cache on.

        Args:
            prompts: token ids of B rows.
            modulation: of B rows, or None for the LM alone.
            max_new_tokens: longest answer.
            num_beams: 1 is greedy.
            weights: of what each row says under its modulation, against what the LM alone says (see `SurerReading`);
                None for nothing but the former.
        """
        count = len(prompts)
        prompts, modulation, surer = _twice(prompts, modulation, weights)
        ids, mask, _ = self._padded(prompts, modulation)
        with _attached(modulation, self.model):
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=modulation.cache(num_beams) if modulation else None,
                max_new_tokens=max_new_tokens,
                num_beams=num_beams,
                do_sample=False,
                logits_processor=[surer] if surer else [],
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
        """Answers a batch of prompts greedily at each of several weights; the prompts are read once for all of them.

        Args:
            prompts: token ids of B rows.
            modulation: of B rows.
            max_new_tokens: longest answers.
            weights: of what is said under the modulation, from 0, the LM alone, to 1 (see `SurerReading`).

        Returns:
            For each weight B answers: what `generate` gives at it.
        """
        rows = len(prompts) * len(weights)
        steps = self._greedy(prompts, modulation, list(weights) * len(prompts), copies=len(weights))
        ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        said: list[Tensor] = []
        while len(said) < max_new_tokens and not ended.all():
            said.append(next(steps)[:rows].masked_fill(ended, self.tokenizer.pad_token_id))
            ended |= said[-1] == self.tokenizer.eos_token_id
        texts = self.tokenizer.batch_decode(torch.stack(said, 1), skip_special_tokens=True)
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
        """Yields the greedy answer to one prompt piece by piece; joined, they are what `generate` returns."""
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
        """Yields the next token of each row, without end: of B rows, or 2B where both readings say the same token.

        Args:
            prompts, modulation: of B rows.
            weights: as `generate` takes them, one for each copy of each row.
            copies: how many rows become of each, one behind the other, when the prompts have been read.
        """
        prompts, modulation, surer = _twice(prompts, modulation, weights)
        ids, mask, positions = self._padded(prompts, modulation)
        cache = modulation.cache() if modulation else None
        prompted = parts_argument(self.model, torch.ones_like(ids))
        while True:
            with _attached(modulation, self.model):
                output = self.model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                    **prompted,
                )
            cache, logits = output.past_key_values, output.logits[:, -1]
            if copies > 1:
                cache.batch_repeat_interleave(copies)
                logits, mask, positions = (part.repeat_interleave(copies, 0) for part in (logits, mask, positions))
                copies = 1
            tokens = (surer(ids, logits) if surer else logits).argmax(-1)
            yield tokens
            ids = tokens[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            positions = positions[:, -1:] + 1
            prompted = {}

    def _padded(self, rows: Sequence[Sequence[int]], modulation: Modulation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows padded on the left: ids `[B, L]`, mask `[B, P + L]` with the prefix, positions `[B, L]`."""
        length = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (length - len(row)) + [*row] for row in rows], device=self.device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=self.device)
        if modulation:
            mask = torch.cat([modulation.prefix_mask(mask), mask], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -length:]
        return ids, mask, positions


def _twice(
    prompts: Sequence[Sequence[int]], modulation: Modulation | None, weights: Sequence[float] | None
) -> tuple[Sequence[Sequence[int]], Modulation | None, SurerReading | None]:
    """The prompts under their modulation and, behind them, again without, and what joins both readings."""
    if modulation is None or weights is None:
        return prompts, modulation, None
    return [*prompts, *prompts], modulation.beside_none(), SurerReading(weights)


def _attached(modulation: Modulation | None, model: nn.Module) -> Any:
    return modulation.attached(model) if modulation else nullcontext()
