"""The frozen base LM theta_base under a modulation: loss, and greedy and sampled decoding, also as an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from mac_rag.config import BaseLMConfig, ModulationConfig, PromptFormat
from mac_rag.data.types import Decoded, Token
from mac_rag.errors import MACError, ModelLoadError
from mac_rag.lm.architectures import architecture_of
from mac_rag.lm.batching import pad_rows
from mac_rag.lm.chat import prompt_encoder
from mac_rag.lm.continuous_batch import Answers, CachedRows, ContinuousBatch
from mac_rag.lm.decoding import (
    GREEDY,
    AbstainByMajority,
    ExtractiveDecoding,
    MaxRuleEnsemble,
    Sampling,
    SpanSource,
    abstention_beginning,
    numeral_tokens,
)
from mac_rag.lm.devices import DeviceMap, device_of
from mac_rag.lm.loading import list_of_layers, load_causal_lm
from mac_rag.lm.prompt import positions_of, slot_segments
from mac_rag.nn.block_prefix import grouping
from mac_rag.nn.cpu_linear import use_onednn
from mac_rag.nn.growing_cache import growing
from mac_rag.nn.modulation import LMShape, Modulation, attached, linear_names

# Last names of the linear layers that compute queries and values, which LoRA changes: in Llama, Mistral and Qwen; in
# BERT; and in GPT-2, GPT-NeoX and Phi-3, where one layer computes queries, keys and values.
LORA_TARGETS = ("q_proj", "v_proj", "query", "value", "c_attn", "query_key_value", "qkv_proj")


class Pieces:
    """The pieces of an answer that is being written. Joined, they are the answer.

    Args:
        tokenizer: the LM's tokenizer.
        sampling: as the answer is written.
    """

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self._tokenizer, self._sampling = tokenizer, sampling
        self._text, self._told = "", 0  # the text and the number of tokens that the pieces have

    def after(self, said: Sequence[Token]) -> Iterator[Decoded]:
        """The piece that is certain after some tokens, if there is one."""
        text = self._tokenizer.decode([token.id for token in said], skip_special_tokens=True).lstrip()
        # Hold back an incomplete character (it may need several tokens) and a trailing space (the answer may end).
        whole = self._sampling.settled(text).rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
        if len(whole) > len(self._text) and whole.startswith(self._text):
            yield Decoded(whole[len(self._text) :], said[self._told :])
            self._text, self._told = whole, len(said)

    def last(self, answer: Decoded) -> Iterator[Decoded]:
        """The rest of the answer, if there is one; it is empty if the last tokens have no text of their own.

        Raises:
            MACError: for another answer than the one whose pieces there have been.
        """
        if not answer.startswith(self._text):
            raise MACError(
                "the thread that wrote this answer was interrupted, and another one began it again in other words; ask "
                "again"
            )
        rest = answer[len(self._text) :]
        if rest or self._told < len(answer.tokens):
            yield Decoded(rest, answer.tokens[self._told :], answer.ended)


class BaseLM(nn.Module):
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
        """Dtype of the hidden states, keys and values: that of the embeddings, which quantisation keeps."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def width(self) -> int:
        """D, the width of the LM's embeddings."""
        width: int = self.model.config.hidden_size
        return width

    @property
    def context_window(self) -> int:
        """Number of positions for prefix, prompt and answer together."""
        window: int = self.model.config.max_position_embeddings
        return window

    @cached_property
    def keeps_letters(self) -> bool:
        """False if the tokenizer drops case, accents or spaces, so that an answer is not written as its document is."""
        probe = "\u00c9lan of O'Brien, 1 (2)"
        ids = self.prompts.texts.ids(probe)
        return bool(self.tokenizer.decode(ids, skip_special_tokens=True).strip() == probe)

    def shape(self, config: ModulationConfig) -> LMShape:
        """The sizes of this LM that a modulation network needs.

        Raises:
            ModelLoadError: for LoRA, if no module has one of the names of `LORA_TARGETS`.
        """
        lm = self.model.config
        linears = linear_names(self.model, LORA_TARGETS)
        embeddings = self.model.get_input_embeddings()
        if config.kind == "lora" and not linears:
            raise ModelLoadError(
                f"no linear module of {lm.model_type} is named {', '.join(LORA_TARGETS)}, which LoRA changes; choose "
                "another modulation.kind"
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
        """The LM's keys and values of a text, `[layers, 2, kv_heads, L, head_width]`, in its dtype.

        Args:
            ids: L token ids.
            modulation: modulation of one row; its prefix comes before the text. None for the LM alone.
        """
        return self.keys_values_of([ids], modulation)[0]

    @torch.no_grad()
    def keys_values_of(self, texts: Sequence[Sequence[int]], modulation: Modulation | None = None) -> list[Tensor]:
        """As `keys_values`, for B texts in one batch, with a modulation of B rows."""
        rows, mask, positions, _ = self._padded(texts, modulation)
        # Without a configuration a cache keeps all positions, also in layers with a sliding window.
        cache = self._cache(modulation) or DynamicCache()
        segments = self.architecture.segment_arguments(torch.ones_like(rows))
        self._read(rows, mask, positions, cache, modulation, segments)
        parts = [part for layer in cache for part in layer[:2]]  # [B, kv_heads, P + L, head_width], padded on the left
        return [
            torch.stack([part[row, :, part.shape[2] - len(ids) :].to(self.device) for part in parts]).unflatten(
                0, (-1, 2)
            )
            for row, ids in enumerate(texts)
        ]

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
            segment_ids: for an LM that takes segments, the segment of each prompt token, never 0 (see
                `mac_rag.lm.prefix_lm.prefix_mask`); None for the segments of the prompt format.
            hidden: for such an LM, True for prompt tokens that only their own segment sees; None if there are none.
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
        """Negative log-likelihood of each answer's tokens, one tensor per answer; arguments as for `answer_loss`."""
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

        N is the number of tokens of all answers. Arguments as for `answer_loss`.
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
        with attached(modulation, self.model), grouping(self.model):
            if self.architecture.linear_head:
                states = self.model.base_model(**inputs).last_hidden_state[:, -longest - 1 : -1]
                logits: Tensor = self.model.get_output_embeddings()(states[is_answer.to(states.device)])
            else:
                logits = self.model(**inputs, logits_to_keep=longest + 1).logits[:, :-1][is_answer]
        return logits.to(self.device)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        modulation: Modulation | None,
        *,
        max_new_tokens: int,
        weights: Sequence[float] | None = None,
        sampling: Sampling = GREEDY,
        sources: Sequence[Sequence[SpanSource]] | None = None,
    ) -> list[Decoded]:
        """Answers a batch of prompts, greedily or by sampling.

        Args:
            prompts: token ids of B rows.
            modulation: modulation of B rows; None for the LM alone.
            max_new_tokens: largest number of tokens of an answer.
            weights: memory weight of each row for max-rule ensemble decoding (see `MaxRuleEnsemble`); None decodes with
                the modulation only.
            sampling: how tokens are chosen, and which strings end an answer early.
            sources: for each row the texts that its answer may copy (see `ExtractiveDecoding`); None for free answers.
        """
        batch = ContinuousBatch()
        answers = self.begin(
            batch, prompts, modulation, max_new_tokens=max_new_tokens, weights=weights, sampling=sampling,
            sources=sources,
        )  # fmt: skip
        while not answers.over:
            batch.step()
        answers.check()
        return [answers.ended[row] for row in range(len(prompts))]

    def begin(
        self,
        batch: ContinuousBatch,
        prompts: Sequence[Sequence[int]],
        modulation: Modulation | None,
        *,
        max_new_tokens: int,
        weights: Sequence[float] | None = None,
        sampling: Sampling = GREEDY,
        sources: Sequence[Sequence[SpanSource]] | None = None,
        tell: Callable[[int, Decoded], object] | None = None,
        hear: Callable[[int, Sequence[Token]], bool] | None = None,
    ) -> Answers:
        """Adds the answers to some prompts to those that are being written; a later step of the batch reads them.

        Args:
            batch: the batch, of which this LM writes all answers.
            prompts, modulation, max_new_tokens, weights, sampling, sources: as `generate` takes them.
            tell, hear: as `Answers` takes them.
        """
        rows = len(prompts)
        prompts, modulation, ensemble = _with_and_without(prompts, modulation, weights)
        answers = Answers(
            rows,
            most=max_new_tokens,
            sampling=sampling,
            processors=[self._abstaining(), self._extractive(sources, modulation, ensemble)],
            ensemble=ensemble,
            end_tokens=self.end_tokens,
            write=self._decoded,
            tell=tell,
            hear=hear,
        )
        batch.add(
            answers,
            lambda: self._read_prompts(prompts, modulation),
            prefix=modulation.prefix_length if modulation else 0,
            text=max(map(len, prompts), default=0) + max_new_tokens,
        )
        return answers

    @torch.no_grad()
    def steps(
        self, prompts: Sequence[Sequence[int]], modulation: Modulation | None
    ) -> Generator[Tensor, tuple[Tensor, Tensor], None]:
        """The steps of a search of one's own: yields logits `[N, vocabulary]` of the next token, first of B prompts.

        To continue, send the rows that the next ones follow, `[N]`, which may repeat, and the next tokens `[N]`.
        """
        rows, logits = self._read_prompts(prompts, modulation)
        while True:
            chosen, tokens = yield logits
            rows = rows.of(chosen)
            logits = rows.read(tokens)

    def _read_prompts(
        self, prompts: Sequence[Sequence[int]], modulation: Modulation | None
    ) -> tuple[CachedRows, Tensor]:
        """Reads B prompts; returns their rows, and the logits of the next tokens, `[B, vocabulary]`."""
        ids, mask, positions, segment_ids = self._padded(prompts, modulation)
        cache, segments = growing(self._cache(modulation)), self.architecture.segment_arguments(segment_ids)
        output = self._read(ids, mask, positions, cache, modulation, segments)
        rows = CachedRows(self._read, output.past_key_values, mask, positions[:, -1], modulation)
        return rows, output.logits[:, -1]

    def ends(self, tokens: Tensor) -> Tensor:
        """True for each token that ends an answer."""
        return torch.isin(tokens, torch.tensor(self.end_tokens, device=tokens.device))

    def _decoded(self, generated: Tensor) -> list[str]:
        """Texts of generated tokens `[B, L]`, without the tokens that end an answer and without leading space."""
        # The tokenizer skips special tokens only, and not every end token is special; its own is.
        kept = generated.masked_fill(self.ends(generated), self.tokenizer.eos_token_id)
        texts: list[str] = self.tokenizer.batch_decode(kept, skip_special_tokens=True)
        return [text.lstrip() for text in texts]

    @torch.no_grad()
    def stream(
        self,
        prompt: Sequence[int],
        modulation: Modulation | None,
        *,
        max_new_tokens: int,
        weights: Sequence[float] | None = None,
        sampling: Sampling = GREEDY,
        sources: Sequence[Sequence[SpanSource]] | None = None,
    ) -> Iterator[Decoded]:
        """Yields the answer to one prompt piece by piece. Joined, the pieces are what `generate` returns.

        The last piece is empty if its tokens have no text of their own.
        """
        batch = ContinuousBatch()
        answers = self.begin(
            batch, [prompt], modulation, max_new_tokens=max_new_tokens, weights=weights, sampling=sampling,
            sources=sources,
        )  # fmt: skip
        pieces = Pieces(self.tokenizer, sampling)
        while True:
            batch.step()
            answers.check()
            if answers.over:
                break
            yield from pieces.after(answers.said[0])
        yield from pieces.last(answers.ended[0])

    def _abstaining(self) -> AbstainByMajority | None:
        """Decides when the LM may abstain; None if it has not learned to.

        In a chat, the first token decides. Few answers of an LM that has learned to abstain begin as an abstention
        does, with "I", and those may begin with another word unless they are more probable than all others together.
        """
        if self.abstention is None:
            return None
        return AbstainByMajority(self.abstention[:1] if self.prompts.format.chat else self.abstention)

    @cached_property
    def abstention(self) -> list[int] | None:
        """The tokens that distinguish the LM's abstention from answers; None if it has not learned to abstain."""
        return abstention_beginning(self.prompts)

    def _extractive(
        self,
        sources: Sequence[Sequence[SpanSource]] | None,
        modulation: Modulation | None,
        ensemble: MaxRuleEnsemble | None,
    ) -> ExtractiveDecoding | None:
        """Binds answers to their sources; None without sources."""
        if sources is None:
            return None
        with_memory_only = modulation is not None and ensemble is None
        return ExtractiveDecoding(
            [()] * len(sources) if with_memory_only else sources,
            prompt_length=0,
            end_tokens=self.end_tokens,
            numerals=self._numerals,
            halves=ensemble is not None,
        )

    @cached_property
    def _numerals(self) -> list[int]:
        return numeral_tokens(self.tokenizer)

    def _read(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: DynamicCache | None,
        modulation: Modulation | None,
        segments: Mapping[str, Tensor],
    ) -> Any:
        """One pass over tokens `[B, L]` that follow a cache; the LM's output, with logits of the last token only."""
        with attached(modulation, self.model), grouping(self.model):
            return self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **segments,
            )

    def _cache(self, modulation: Modulation | None) -> DynamicCache | None:
        """The prefix of a modulation, each layer's part on the device where the layer runs; None without a prefix."""
        cache: Any = modulation.cache(self.dtype) if modulation else None
        if cache is not None:
            for entry, layer in zip(cache.layers, list_of_layers(self.model)[1], strict=True):
                entry.keys, entry.values = (part.to(device_of(layer)) for part in (entry.keys, entry.values))
        prefix: DynamicCache | None = cache
        return prefix

    def _padded(
        self,
        prompts: Sequence[Sequence[int]],
        modulation: Modulation | None,
        answers: Sequence[Sequence[int]] | None = None,
        segment_ids: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prompts with their answers, padded on the left; tokens of the modulation, if any, come before the padding.

        Returns:
            Ids `[B, L]`, attention mask `[B, P + L]` with the prefix, positions and segments `[B, L]`; segments are 0
            for answers and padding.
        """
        answers = answers or [()] * len(prompts)
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        ids, mask = pad_rows(rows, self.tokenizer.pad_token_id, self.device, "left")
        segment_ids = segment_ids or [self.prompts.segment_ids(prompt) for prompt in prompts]
        segments = self._padded_prompts(segment_ids, [len(answer) for answer in answers], ids)
        length = ids.shape[1]
        slots: list[int] = []
        if modulation:
            mask = torch.cat([modulation.prefix_mask(mask), mask], 1)
            slots = slot_segments(modulation.slots, modulation.prefix_length) if modulation.slots else []
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -length:]
        if modulation and modulation.next_positions is not None:
            positions = modulation.next_positions[:, None] + (mask[:, -length:].cumsum(1) - 1).clamp(min=0)
        if slots or any(-1 in row for row in segment_ids):
            shown = modulation.shown_rows(len(rows)) if modulation else 0
            moved = []
            for number, (row, answer) in enumerate(zip(segment_ids, answers, strict=True)):
                front = slots if number < shown else []
                moved.append(positions_of([*front, *row, *[0] * len(answer)])[len(front) :])
            cached = mask[:, :-length].sum(1, keepdim=True) if not slots else 0
            positions = pad_rows(moved, 0, self.device, "left")[0] + cached
        if slots:
            front_positions = torch.tensor(positions_of(slots), device=self.device)
            ids = _in_front(torch.full_like(front_positions, self.tokenizer.pad_token_id), ids)
            positions = _in_front(front_positions, positions)
            segments = _in_front(torch.tensor(slots, device=self.device), segments)
        return ids, mask, positions, segments

    def _padded_prompts(self, values: Sequence[Sequence[int]], answer_lengths: Sequence[int], ids: Tensor) -> Tensor:
        """One value for each prompt token, and 0 for padding and answers: `[B, L]`, aligned with the ids.

        Args:
            values: a value for each prompt token of B rows.
            answer_lengths: number of tokens after each prompt.
            ids: `[B, L]`, prompts and answers padded on the left.
        """
        padded = torch.zeros(ids.shape, dtype=ids.dtype)  # filled on the CPU: a GPU takes it in one copy
        for row, prompt, count in zip(padded, values, answer_lengths, strict=True):
            end = len(row) - count
            row[end - len(prompt) : end] = torch.tensor(prompt)
        return padded.to(ids.device)


def _end_tokens(model: Any) -> list[int]:
    """The end tokens in an LM's generation config: none, one or several.

    Raises:
        ModelLoadError: for values that are no token ids.
    """
    stored = model.generation_config.eos_token_id
    ends = stored if isinstance(stored, list | tuple) else [] if stored is None else [stored]
    if not all(isinstance(end, int) for end in ends):
        raise ModelLoadError(
            f"the LM's generation config has the end tokens {stored!r:.80}, which are no token ids; correct "
            "eos_token_id in generation_config.json"
        )
    size = len(model.get_input_embeddings().weight)
    return [end for end in ends if 0 <= end < size]  # the LM can write no others


def _without_gaps(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Makes the states that an LM's head reads contiguous; the last tokens of a batch's rows are not.

    The matrix product would otherwise take such rows one by one, and read the head's weights for each.
    """
    return tuple(tensor.contiguous() for tensor in inputs)


def _in_front(values: Tensor, rows: Tensor) -> Tensor:
    """The rows `[B, L]` with the same values `[P]` before each: `[B, P + L]`."""
    return torch.cat([values.expand(len(rows), -1), rows], 1)


def _with_and_without(
    prompts: Sequence[Sequence[int]], modulation: Modulation | None, weights: Sequence[float] | None
) -> tuple[Sequence[Sequence[int]], Modulation | None, MaxRuleEnsemble | None]:
    """For an ensemble: 2B rows, the second half without modulation, and the processor that combines the halves.

    Without weights or without a modulation, rows and modulation stay as they are, and there is no processor.
    """
    if modulation is None or weights is None:
        return prompts, modulation, None
    return [*prompts, *prompts], modulation.beside_none(), MaxRuleEnsemble(weights)
