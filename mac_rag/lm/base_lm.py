"""The frozen base LM theta_base: loss, generation and streaming under a modulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from mac_rag.config import BaseLMConfig, ModulationConfig, PromptFormat
from mac_rag.errors import ModelLoadError
from mac_rag.lm.architectures import architecture_of
from mac_rag.lm.chat import prompt_encoder
from mac_rag.lm.decoding import DecodingMixin
from mac_rag.lm.device_map import DeviceMap, device_of
from mac_rag.lm.loading import list_of_layers, load_causal_lm
from mac_rag.nn.cpu_linear import use_onednn
from mac_rag.nn.modulation import LMShape, Modulation, attached, linear_names

# Last names of the linear layers that make queries and values, by default the targets of LoRA: in Llama, Mistral and
# Qwen; in BERT; and in GPT-2, GPT-NeoX and Phi-3, where one layer makes them all.
LORA_TARGETS = ("q_proj", "v_proj", "query", "value", "c_attn", "query_key_value", "qkv_proj")


class BaseLM(DecodingMixin, nn.Module):
    """A causal LM that answers under a modulation.

    Args:
        model: any transformers causal LM.
        tokenizer: its tokenizer, with a padding token.
        prompt_format: how documents, questions and answers are written.

    Attributes:
        prompts: writes prompts.
        end_tokens: ids of the tokens that end an answer: those of the prompts and of the LM's generation config.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt_format: PromptFormat) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.architecture = architecture_of(model)
        self.architecture.check_format(prompt_format)
        self.prompts = prompt_encoder(tokenizer, prompt_format)
        self.end_tokens = sorted({*self.prompts.end_tokens, *_end_tokens(model)})
        model.get_output_embeddings().register_forward_pre_hook(_without_gaps)
        use_onednn(model)

    @classmethod
    def load(
        cls,
        config: BaseLMConfig,
        prompt_format: PromptFormat,
        device: torch.device,
        folder: Path | None = None,
        modulation: str | None = None,
        device_map: DeviceMap | None = None,
    ) -> BaseLM:
        """Loads the LM, frozen and in evaluation mode; see `load_causal_lm` for the arguments and errors."""
        model, tokenizer = load_causal_lm(config, device, folder, modulation, device_map)
        return cls(model.requires_grad_(False).eval(), tokenizer, prompt_format)

    @property
    def device(self) -> torch.device:
        """The device of the embeddings: token ids go there, and logits come back."""
        return device_of(self.model.get_input_embeddings())

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
        embeddings = self.model.get_input_embeddings()
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
            embeddings=next(name for name, module in self.model.named_modules() if module is embeddings),
        )

    def _block_names(self) -> tuple[str, ...]:
        """Names of the decoder layers."""
        name, layers = list_of_layers(self.model)
        return tuple(f"{name}.{index}" for index in range(len(layers)))

    @torch.no_grad()
    def keys_values(self, ids: Sequence[int], modulation: Modulation | None = None) -> Tensor:
        """The keys and values that the LM computes of a text, `[layers, 2, kv_heads, L, head_width]`, in its dtype.

        Args:
            ids: L token ids.
            modulation: modulation of one row, whose prefix stands in front of the text; None for none.
        """
        rows, mask, positions, _ = self._padded([ids], modulation)
        # Without a configuration a cache keeps all positions, also in layers with a sliding window.
        cache = self._cache(modulation) or DynamicCache()
        segments = self.architecture.segment_arguments(torch.ones_like(rows))
        self._read(rows, mask, positions, cache, modulation, segments)
        layers = torch.stack([torch.stack([layer[0][0], layer[1][0]]).to(self.device) for layer in cache])
        return layers[..., -len(ids) :, :]

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
            segment_ids: for an LM that takes segments, the segment of each prompt token, not 0 (see
                `mac_rag.lm.prefix_lm.prefix_mask`); None for those of the prompt format.
            hidden: for such an LM, True for prompt tokens that only their own segment sees; None for none.
        """
        losses = torch.cat(self.token_losses(prompts, answers, modulation, segment_ids=segment_ids, hidden=hidden))
        rows = torch.tensor([row for row, answer in enumerate(answers) for _ in answer], device=losses.device)
        return losses.new_zeros(len(answers)).index_add(0, rows, losses)

    def token_losses(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        modulation: Modulation | None,
        *,
        segment_ids: Sequence[Sequence[int]] | None = None,
        hidden: Sequence[Sequence[bool]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Negative log-likelihood of each token of the answers, one tensor for each; arguments as `answer_loss`'s."""
        logits = self.answer_logits(prompts, answers, modulation, segment_ids=segment_ids, hidden=hidden).float()
        targets = torch.tensor([token for answer in answers for token in answer], device=self.device)
        losses = functional.cross_entropy(logits, targets, reduction="none")
        by_answer: tuple[Tensor, ...] = losses.split([len(answer) for answer in answers])
        return by_answer

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
        longest = max(map(len, answers))
        ids, mask, positions, segments = self._padded(prompts, modulation, answers, segment_ids)
        lengths = torch.tensor([len(answer) for answer in answers])
        is_answer = (torch.arange(longest) >= longest - lengths[:, None]).to(self.device)
        hidden_tokens = None
        if hidden is not None:
            hidden_tokens = self._padded_prompts(hidden, [len(answer) for answer in answers], ids).bool()
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": self._cache(modulation),
            **self.architecture.segment_arguments(segments, hidden_tokens),
        }
        with attached(modulation, self.model):
            if self.architecture.linear_head:
                states = self.model.base_model(**inputs).last_hidden_state[:, -longest - 1 : -1]
                logits: Tensor = self.model.get_output_embeddings()(states[is_answer.to(states.device)])
            else:
                logits = self.model(**inputs, logits_to_keep=longest + 1).logits[:, :-1][is_answer]
        return logits.to(self.device)


def _end_tokens(model: Any) -> list[int]:
    """The end tokens of an LM's generation config, which holds none, one or several.

    Raises:
        ModelLoadError: for values that are no token ids.
    """
    stored = model.generation_config.eos_token_id
    ends = stored if isinstance(stored, list | tuple) else [] if stored is None else [stored]
    if not all(isinstance(end, int) for end in ends):
        raise ModelLoadError(f"the LM's generation config has the end tokens {stored!r:.80}, which are no token ids")
    size = len(model.get_input_embeddings().weight)
    return [end for end in ends if 0 <= end < size]  # the LM writes no others


def _without_gaps(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies the states that an LM's head reads, if they have gaps, as the last token of each row of a batch has.

    The matrix product would take such rows one by one, and read the head's weights for each.
    """
    return tuple(tensor.contiguous() for tensor in inputs)
