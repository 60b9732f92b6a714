"""Modulations: phi* `[B, T, D]` becomes a change to the frozen LM, one for each row of its batch.

A *modulation network* maps phi* to a `Modulation`, which the base LM applies: as keys and values before the text in
every layer (P-tuning v2), through forward hooks on the LM's own modules (LoRA, FiLM), or as tokens before the prompt
(prompt tuning). All work in batched forward passes and in generation, and a batch gives the same results as its rows
one by one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, cat, nn, zeros
from transformers import DynamicCache
from transformers.masking_utils import create_masks_for_generate

from mac_rag.nn.amortization import ResidualLinear


@dataclass(frozen=True)
class LMShape:
    """The sizes of an LM that modulation networks need.

    Attributes:
        layers: number of decoder layers.
        kv_heads, head_width: number of heads of one layer's keys and values, and their width.
        width: width of the hidden states.
        linears: name -> (inputs, outputs) of every linear module that LoRA changes.
        blocks: names of the decoder layers, which FiLM changes.
        embeddings: name of the module of the token embeddings.
    """

    layers: int
    kv_heads: int
    head_width: int
    width: int
    linears: dict[str, tuple[int, int]]
    blocks: tuple[str, ...]
    embeddings: str


class Modulation(ABC):
    """A modulation of B rows, to be applied to an LM.

    Attributes:
        prefix_length: P, number of keys and values before each row; 0 for modulations without a prefix.
        slots: S if the LM computes the P keys and values from tokens, in S parts that do not see each other; 0 if they
            are in a cache.
    """

    prefix_length: int = 0
    slots: int = 0

    @property
    def next_positions(self) -> Tensor | None:
        """Position of each row's first token after the prefix, `[B]`; None if that is the prefix's length."""
        return None

    @abstractmethod
    def beside_none(self) -> Modulation:
        """A modulation of 2B rows: these B, followed by B that leave the LM unchanged."""

    def prefix_mask(self, mask: Tensor) -> Tensor:
        """The prefix's attention mask `[B, P]`, to be put before the prompts' attention mask `[B, L]`."""
        seen = mask.new_ones(len(mask), self.prefix_length)
        seen[self.shown_rows(len(mask)) :] = 0
        return seen

    def shown_rows(self, rows: int) -> int:
        """Number of the LM's rows that see the prefix; they come first."""
        return rows

    def cache(self, dtype: torch.dtype) -> DynamicCache | None:
        """A key-value cache that holds the prefix; None without a prefix. Each call makes a new one: use changes it.

        `dtype`: the LM's, in which its attention computes keys and values.
        """
        return None

    @contextmanager
    def attached(self, lm: nn.Module) -> Iterator[None]:
        """Applies the modulation to the LM's modules within the context."""
        yield

    @abstractmethod
    def after_cache(self, rows: Tensor) -> Modulation:
        """Modulation for a subset of the LM's rows, whose prefixes are already in the cache.

        Its prefix may be shorter: positions that none of these rows sees are to be taken out of the cache, too.

        Args:
            rows: their indices; after `beside_none`, each has its equal in the other half.
        """

    @abstractmethod
    def followed_by(self, other: Modulation) -> Modulation | None:
        """Modulation of these rows and then of another's, all of them with their prefixes in one cache.

        In that cache, blank positions after the shorter prefixes make all of them equally long.

        Args:
            other: a modulation of C rows; both come from `after_cache`.

        Returns:
            A modulation of B + C rows; None if they cannot share a pass of the LM.
        """


def attached(modulation: Modulation | None, lm: nn.Module) -> AbstractContextManager[None]:
    """`modulation.attached(lm)`; a context that does nothing without a modulation."""
    return modulation.attached(lm) if modulation else nullcontext()


class PrefixModulation(Modulation):
    """P-tuning v2: P keys and values before the text in every layer.

    Args:
        keys_values: `[B, layers, 2, kv_heads, P, head_width]`.
        half: True shows the prefix only to the first half of the rows.
    """

    def __init__(self, keys_values: Tensor, half: bool = False) -> None:
        self._keys_values = keys_values
        self._half = half
        self.prefix_length = keys_values.shape[4]

    def beside_none(self) -> PrefixModulation:
        return PrefixModulation(self._keys_values.repeat(2, 1, 1, 1, 1, 1), half=True)

    def shown_rows(self, rows: int) -> int:
        return rows // 2 if self._half else rows

    def cache(self, dtype: torch.dtype) -> DynamicCache:
        rows = self._keys_values.to(dtype)
        # Without a configuration the cache keeps all positions, even in layers with a sliding window.
        return DynamicCache([(layer[:, 0], layer[:, 1]) for layer in rows.unbind(1)])

    @contextmanager
    def attached(self, lm: nn.Module) -> Iterator[None]:
        with visible_prefix(lm, self.prefix_length):
            yield

    def after_cache(self, rows: Tensor) -> PrefixModulation:
        return self

    def followed_by(self, other: Modulation) -> PrefixModulation | None:
        # All that is still asked for is the length, which has to be the one at which every row's text begins.
        alike = isinstance(other, PrefixModulation) and other.prefix_length == self.prefix_length
        return self if alike else None


@dataclass(frozen=True)
class Change:
    """A change of one module's output, for each of B rows.

    Attributes:
        function: `(input, output, *values) -> changed output`.
        values: tensors `[B, ...]`; with B = 1, one for all rows of the LM's batch.
    """

    function: Callable[..., Tensor]
    values: tuple[Tensor, ...]

    def __call__(self, inputs: Tensor, output: Tensor) -> Tensor:
        return self.function(inputs, output, *(value.expand(len(output), *value.shape[1:]) for value in self.values))

    def of(self, rows: Tensor) -> Change:
        """The change for a subset of the rows, by their indices."""
        return Change(self.function, tuple(value[rows.to(value.device)] for value in self.values))

    def followed_by(self, other: Change) -> Change:
        """The change of these rows and then of another's, which has the same function."""
        return Change(self.function, tuple(torch.cat(pair) for pair in zip(self.values, other.values, strict=True)))


class HookedModulation(Modulation):
    """A modulation by forward hooks on the LM's modules, by name.

    Args:
        changes: module name -> the change of its output.
        half: True changes only the first half of the LM's rows.
    """

    def __init__(self, changes: dict[str, Change], half: bool = False) -> None:
        self._changes = changes
        self._half = half

    def beside_none(self) -> HookedModulation:
        return HookedModulation(self._changes, half=True)

    @contextmanager
    def attached(self, lm: nn.Module) -> Iterator[None]:
        handles = [
            lm.get_submodule(name).register_forward_hook(_hook(_first_half(change) if self._half else change))
            for name, change in self._changes.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def after_cache(self, rows: Tensor) -> HookedModulation:
        changes = {}
        for name, change in self._changes.items():
            changed = rows[rows < len(change.values[0])] if self._half else rows
            changes[name] = change.of(changed)
        return HookedModulation(changes, self._half)

    def followed_by(self, other: Modulation) -> HookedModulation | None:
        if not isinstance(other, HookedModulation) or self._half or other._half:
            return None  # the halves of both would be the first and the third quarter
        functions = [{name: change.function for name, change in each._changes.items()} for each in (self, other)]
        if functions[0] != functions[1]:
            return None
        both = {name: change.followed_by(other._changes[name]) for name, change in self._changes.items()}
        return HookedModulation(both)


def _hook(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        # A decoder layer may return a tuple whose first element is its hidden states.
        if isinstance(output, tuple):
            return (change(inputs[0], output[0]), *output[1:])
        return change(inputs[0], output)

    return hook


def _first_half(change: Change) -> Callable[[Tensor, Tensor], Tensor]:
    def changed(inputs: Tensor, output: Tensor) -> Tensor:
        rows = len(output) // 2
        return torch.cat([change(inputs[:rows], output[:rows]), output[rows:]])

    return changed


class ModulationNetwork(nn.Module, ABC):
    """Maps phi* to a modulation of one LM.

    Attributes:
        prefix_length: number of positions that its modulations take before each row; 0 for those without a prefix.
    """

    prefix_length: int = 0

    @abstractmethod
    def forward(self, phi: Tensor) -> Modulation:
        """A modulation of B rows from phi* `[B, T, D]`."""


class PrefixTuning(ModulationNetwork):
    """P-tuning v2 from phi*: each token gives the keys and values of one position in every layer.

    P is T, plus the length of the attention sink if there is one.

    Args:
        shape: the LM's sizes.
        tokens: T.
        width: D.
        bottleneck: inner width of a two-layer map; None for one linear layer, as in the paper. Wide LMs need a
            bottleneck: one linear layer to all keys and values of LLaMA-2-7B would have a billion weights.
        sink: puts the LM's attention sink before the generated keys and values, and rotates the keys to their
            positions; None for a prefix that is entirely generated.
    """

    def __init__(
        self,
        shape: LMShape,
        tokens: int,
        width: int,
        *,
        bottleneck: int | None = None,
        sink: AttentionSink | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.sink = sink
        self.prefix_length = tokens + (0 if sink is None else sink.length)
        outputs = shape.layers * 2 * shape.kv_heads * shape.head_width
        self.norm = nn.LayerNorm(width)
        self.to_keys_values = _linear(width, bottleneck, outputs)

    def forward(self, phi: Tensor) -> PrefixModulation:
        shape = self.shape
        mapped: Tensor = self.to_keys_values(self.norm(phi))  # [B, T, layers * 2 * kv_heads * head_width]
        positions = mapped.unflatten(-1, (shape.layers, 2, shape.kv_heads, shape.head_width))
        generated = positions.permute(0, 2, 3, 4, 1, 5)
        return PrefixModulation(generated if self.sink is None else self.sink(generated))


_LORA_ALPHA = 16.0


class LoRA(ModulationNetwork):
    """LoRA generated for each question: each token of phi* gives one rank-one update of each changed linear layer.

    The update of a layer of `n` inputs is `x -> alpha / T * sum_t (x . a_t) / sqrt(n) b_t`. The map to `b` starts at
    zero, so an untrained network leaves the LM unchanged. The root gives `a` the initial size of LoRA's own; without
    it, training hardly moves.

    Args:
        shape: the LM's sizes; its `linears` are changed.
        tokens: T, the rank.
        width: D.
        bottleneck: inner width of a two-layer map; None for one linear layer.
    """

    def __init__(self, shape: LMShape, tokens: int, width: int, *, bottleneck: int | None = None) -> None:
        super().__init__()
        self.names = tuple(shape.linears)
        self.inputs = [shape.linears[name][0] for name in self.names]
        self.outputs = [shape.linears[name][1] for name in self.names]
        self.scale = _LORA_ALPHA / tokens
        self.norm = nn.LayerNorm(width)
        self.to_a = _linear(width, bottleneck, sum(self.inputs))
        self.to_b = _linear(width, bottleneck, sum(self.outputs), zero=True)

    def forward(self, phi: Tensor) -> HookedModulation:
        normed = self.norm(phi)
        downs = self.to_a(normed).split(self.inputs, -1)  # per layer [B, T, inputs]
        ups = self.to_b(normed).split(self.outputs, -1)  # per layer [B, T, outputs]
        return HookedModulation(
            {name: Change(self._changed, (down, up)) for name, down, up in zip(self.names, downs, ups, strict=True)}
        )

    def _changed(self, inputs: Tensor, output: Tensor, down: Tensor, up: Tensor) -> Tensor:
        inputs = inputs.to(output.device)  # the module may run on another device
        ranked: Tensor = inputs @ down.to(inputs).mT / math.sqrt(inputs.shape[-1])
        return output + self.scale * (ranked @ up.to(inputs)).to(output.dtype)


class FiLM(ModulationNetwork):
    """FiLM: a scale and a shift of the hidden states after each decoder layer, from the mean of phi*'s tokens.

    `h -> h (1 + gamma) + beta`; gamma and beta start at zero.

    Args:
        shape: the LM's sizes.
        width: D.
        bottleneck: inner width of a two-layer map; None for one linear layer.
    """

    def __init__(self, shape: LMShape, width: int, *, bottleneck: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.norm = nn.LayerNorm(width)
        self.to_gamma_beta = _linear(width, bottleneck, shape.layers * 2 * shape.width, zero=True)

    def forward(self, phi: Tensor) -> HookedModulation:
        mapped: Tensor = self.to_gamma_beta(self.norm(phi).mean(1))
        layers = mapped.unflatten(-1, (self.shape.layers, 2, self.shape.width)).unbind(1)
        return HookedModulation(
            {name: Change(_scaled_and_shifted, (layer,)) for name, layer in zip(self.shape.blocks, layers, strict=True)}
        )


def _scaled_and_shifted(_: Tensor, output: Tensor, gamma_beta: Tensor) -> Tensor:
    """`h (1 + gamma) + beta` of hidden states `[rows, L, width]`, with gamma and beta `[rows, 2, width]`."""
    # In bf16, 1 + gamma would lose all of a gamma below 2^-8.
    exact = gamma_beta.to(output.device, torch.promote_types(gamma_beta.dtype, output.dtype))
    gamma, beta = exact[:, :, None].unbind(1)  # each [rows, 1, width]
    return (output * (1 + gamma) + beta).to(output.dtype)


def _linear(inputs: int, bottleneck: int | None, outputs: int, *, zero: bool = False) -> nn.Module:
    """One linear layer, or two with a tanh between them. With `zero`, the map starts at zero."""
    last = nn.Linear(inputs if bottleneck is None else bottleneck, outputs)
    if zero:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    if bottleneck is None:
        return last
    return nn.Sequential(nn.Linear(inputs, bottleneck), nn.Tanh(), last)


def linear_names(lm: nn.Module, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linear modules with a last name in `targets`, including GPT-2's Conv1D."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, module in lm.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        if isinstance(module, nn.Linear):
            sizes[name] = (module.in_features, module.out_features)
        elif hasattr(module, "nf") and hasattr(module, "nx"):  # transformers' Conv1D
            sizes[name] = (module.nx, module.nf)
    return sizes


# Layers that attend to a window of the text only: a prefix of keys and values must stay visible there, too.
#
# A sliding window counts the distance from a token to the prefix, so tokens after a prompt longer than the window would
# not see the prefix. The LM therefore gets masks that allow the window and the prefix.


_LIMITED = {"sliding_attention", "chunked_attention"}


def has_limited_layers(config: Any) -> bool:
    """True if some layers of an LM attend only to a part of the text.

    Args:
        config: the LM's transformers configuration.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return not _LIMITED.isdisjoint(kinds)
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


@contextmanager
def visible_prefix(lm: Any, length: int) -> Iterator[None]:
    """Keeps the first `length` positions of the cache visible in every layer within the context.

    Args:
        lm: a transformers causal LM. Its calls take an attention mask `[B, P + L]`.
        length: P.
    """
    if not has_limited_layers(lm.config):
        yield
        return
    dtype = lm.get_input_embeddings().weight.dtype

    def in_prefix(_batch: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
        return key < length

    def hook(body: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = named["input_ids"]
        masks = create_masks_for_generate(
            config=body.config,
            inputs_embeds=torch.empty(*ids.shape, 0, dtype=dtype, device=ids.device),  # only its sizes are read
            attention_mask=named.get("attention_mask"),  # generation leaves out a mask that is all ones
            past_key_values=named["past_key_values"],
            or_mask_function=in_prefix,
        )
        return arguments, {**named, "attention_mask": masks}

    handle = lm.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# The beginning of a prefix: an attention sink, and generated keys rotated to their positions after it.
#
# LMs put much of their attention on the first tokens of a text, whatever these are (Xiao et al., 2024, "Efficient
# Streaming Language Models with Attention Sinks"). A prefix that takes their place does harm; so the LM's own keys and
# values of its first tokens come before the generated ones. Rotary LMs rotate each key by its position, so the map from
# memory tokens gives keys before rotation, which do not depend on their positions.


class KeyRotation(nn.Module):
    """Rotates the keys of all layers to N positions, and back (rotary position embedding; Su et al., 2021).

    Component i of a key becomes `cos_i key_i + sin_i key_partner(i)`. Pairs of halves and of neighbours, rotations of a
    part of the width, scales, and layers without positions are all of this form: unchanged components have a cosine of
    1 and a sine of 0.

    Examples:
        >>> quarter_turn = KeyRotation(torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]]), torch.tensor([[1, 0]]))
        >>> quarter_turn(torch.tensor([[[[3.0, 4.0]]]]))  # one layer, one head, one position
        tensor([[[[-4.,  3.]]]])

    Args:
        cos, sin: `[layers, N, head_width]`; the sine with its sign.
        partner: `[layers, head_width]`, for each component the index of the other one of its pair.
    """

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def __init__(self, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
        super().__init__()
        for name, buffer in (("cos", cos), ("sin", sin), ("partner", partner)):
            self.register_buffer(name, buffer, persistent=False)  # the LM's, so our checkpoints do not store it

    def forward(self, keys: Tensor) -> Tensor:
        """Rotates keys to the first L of the N positions: `[..., layers, heads, L, head_width]`, same shape out."""
        cos, sin = self._at(keys)
        return (keys * cos).addcmul_(self._partners(keys), sin)

    def inverse(self, keys: Tensor) -> Tensor:
        """Turns keys at the first L of the N positions back into keys before rotation, of the same shape."""
        cos, sin = self._at(keys)
        length = cos.square() + sin.square()
        return torch.addcmul(keys * (cos / length), self._partners(keys), -sin / length)

    @cached_property
    def _halves(self) -> bool:
        """True if pairs lie half of the width apart in all layers, as Llama's: copying is faster than gathering."""
        width = self.partner.shape[-1]
        return bool((self.partner == torch.arange(width, device=self.partner.device).roll(width // 2)).all())

    def _at(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        length = keys.shape[-2]
        return self.cos[:, None, :length], self.sin[:, None, :length]

    def _partners(self, keys: Tensor) -> Tensor:
        if self._halves:
            return keys.roll(keys.shape[-1] // 2, -1)
        return keys.gather(-1, self.partner[:, None, None].expand_as(keys))


class AttentionSink(nn.Module):
    """Puts an LM's own keys and values of its first tokens before generated ones.

    Args:
        keys_values: `[layers, 2, kv_heads, S, head_width]`, keys and values of the LM's first S tokens.
        rotation: rotates keys to the P positions after the sink, from S on.
    """

    keys_values: Tensor

    def __init__(self, keys_values: Tensor, rotation: KeyRotation) -> None:
        super().__init__()
        self.register_buffer("keys_values", keys_values, persistent=False)
        self.rotation = rotation

    @property
    def length(self) -> int:
        """S."""
        return self.keys_values.shape[3]

    def forward(self, generated: Tensor) -> Tensor:
        """Makes a whole prefix from generated keys (before rotation) and values.

        Args:
            generated: `[B, layers, 2, kv_heads, P, head_width]`.

        Returns:
            `[B, layers, 2, kv_heads, S + P, head_width]`.
        """
        keys, values = generated.unbind(2)
        keys = self.rotation(keys)
        rotated = torch.stack([keys, values.to(keys.dtype)], 2)
        sink = self.keys_values.to(rotated.dtype).expand(len(rotated), *self.keys_values.shape)
        return torch.cat([sink, rotated], 4)


# Prompt tuning: the tokens of phi* come before the prompt as if they were tokens of the text.
#
# P-tuning v2 gives the LM keys and values, which are the same for every question. Here each token of phi* is a token of
# the LM (Lester et al., 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning"), which the layers transform
# like the tokens of a text. In an LM whose attention takes segments it sees the question, so the LM reads a memory like
# a text.
#
# phi* has already been through an amortization network. So after the LM's first layers, where a document needs no
# question (Cao et al., 2020, "DeFormer"), the states of its tokens are replaced once more by those from amortization;
# in the layers before, the question can attend to their embeddings.


class PromptModulation(Modulation):
    """P tokens before each prompt, with states from phi*.

    The LM runs over P placeholder tokens, whose states in the outputs of some modules are replaced.

    Args:
        states: name of a module of the LM -> its output for the P tokens, `[B, P, width]`.
        slots: S, number of slots of P / S tokens each; slots do not see each other.
        half: True changes only the first half of the LM's rows.
    """

    def __init__(self, states: Mapping[str, Tensor], slots: int, half: bool = False) -> None:
        self._states = states
        self._half = half
        self.prefix_length = next(iter(states.values())).shape[1]
        self.slots = slots

    def beside_none(self) -> PromptModulation:
        return PromptModulation(self._states, self.slots, half=True)

    def shown_rows(self, rows: int) -> int:
        return rows // 2 if self._half else rows

    @contextmanager
    def attached(self, lm: nn.Module) -> Iterator[None]:
        changes = {name: Change(_replaced, (states,)) for name, states in self._states.items()}
        with HookedModulation(changes, self._half).attached(lm):
            yield

    def after_cache(self, rows: Tensor) -> PromptModulation:
        read = object.__new__(PromptModulation)  # of states that the LM has read, only the number still counts
        read._states, read._half = {}, self._half
        read.prefix_length, read.slots = self.prefix_length, self.slots
        return read

    def followed_by(self, other: Modulation) -> PromptModulation | None:
        alike = isinstance(other, PromptModulation) and other.prefix_length == self.prefix_length
        return self if alike else None


def _replaced(_: Tensor, output: Tensor, states: Tensor) -> Tensor:
    """A module's output with `states` for its first tokens. A single token follows a cache and stays as it is."""
    if output.shape[1] == 1:
        return output
    return cat([states.to(output), output[:, states.shape[1] :]], 1)


class PromptTuning(ModulationNetwork):
    """Prompt tuning from phi*: each token gives an embedding, and a state after the first layers.

    Args:
        shape: the LM's sizes.
        tokens: T, number of tokens of a slot of phi*.
        entry_layer: number of the LM's layers after which phi* gives states.
    """

    def __init__(self, shape: LMShape, tokens: int, *, entry_layer: int) -> None:
        super().__init__()
        self.prefix_length = tokens
        self.entry_layer = entry_layer
        self._names = shape.embeddings, shape.blocks[entry_layer - 1]
        self.to_embeddings = nn.Linear(shape.width, shape.width)
        self.to_states = ResidualLinear(shape.width)
        self.shift = nn.Parameter(zeros(shape.width))

    def forward(self, phi: Tensor) -> PromptModulation:
        states = dict(zip(self._names, (self.to_embeddings(phi), self.to_states(phi) + self.shift), strict=True))
        return PromptModulation(states, phi.shape[1] // self.prefix_length)
