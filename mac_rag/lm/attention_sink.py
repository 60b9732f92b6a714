"""An LM's attention sink, the keys and values of the tokens that begin its texts; and how the LM rotates keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mac_rag.config import ModulationConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.nn.modulation import AttentionSink, KeyRotation


def make_attention_sink(lm: BaseLM, slots: int, window: int | None) -> AttentionSink:
    """The sink of an LM, for a number of generated prefix positions after it.

    Args:
        lm: the LM.
        slots: P, number of generated positions.
        window: largest number of tokens after the prefix; None for all positions of the LM.

    Raises:
        ModelLoadError: as `key_rotation`.
    """
    if lm.device.type == "meta":
        return _shapes_of_sink(lm, slots)
    keys_values = sink_keys_values(lm)
    first = keys_values.shape[3]
    positions = range(first, first + slots)
    longest = lm.context_window if window is None else window + positions.stop
    return AttentionSink(keys_values, key_rotation(lm.model, positions, longest))


def _shapes_of_sink(lm: BaseLM, slots: int) -> AttentionSink:
    """The sink of an LM without weights: shapes only."""
    shape = lm.shape(ModulationConfig())
    with torch.device("meta"):
        keys_values = torch.empty(shape.layers, 2, shape.kv_heads, len(first_tokens(lm)), shape.head_width)
        cos, sin = torch.empty(2, shape.layers, slots, shape.head_width)
        partner = torch.empty(shape.layers, shape.head_width, dtype=torch.long)
    return AttentionSink(keys_values, KeyRotation(cos, sin, partner))


def sink_keys_values(lm: BaseLM) -> Tensor:
    """Keys and values of the LM's first tokens in evaluation mode, `[layers, 2, kv_heads, S, head_width]` in fp32."""
    training = lm.model.training
    lm.model.eval()
    keys_values = lm.keys_values(first_tokens(lm)).float()
    lm.model.train(training)
    return keys_values


def first_tokens(lm: BaseLM) -> Sequence[int]:
    """Ids of the S tokens with which the LM's texts begin.

    These are the tokens that its tokenizer puts before a text. If it puts none, the beginning-of-text token, or else
    the end-of-text token, which separated texts in pretraining.
    """
    tokenizer = lm.prompts.tokenizer
    if lm.prompts.start:
        return lm.prompts.start
    return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


# How an LM rotates its keys by their positions: read from the LM's own rotary embedding, and checked on its own keys.
#
# A token that stands alone attends to itself, at any position. So each layer's key of it is the same vector, rotated to
# the token's position. The LM computes such keys at some positions while hooks record its rotary embedding. Each layer
# then gets the rotation that explains its keys; a layer that none explains is an error, never a guess.


# Cosines and sines at positions `[N]`, as the LM's rotary embedding returns them: `[N, columns]` each.
_Table: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
# Selects one column for each pair of components: a table may hold each column twice, as halves or as neighbours.
_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda table: table,
    "first half": lambda table: table[:, : table.shape[1] // 2],
    "every second": lambda table: table[:, ::2],
}


@dataclass(frozen=True)
class _Form:
    """One way to rotate keys.

    Attributes:
        table: index of the rotary embedding's table; None for keys that stay as they are.
        columns: key of `_COLUMNS`.
        neighbours: True if neighbouring components form a pair; otherwise a pair lies half of the rotated width apart.
        sign: 1 or -1, the direction of the rotation.
    """

    table: int | None = None
    columns: str = "all"
    neighbours: bool = False
    sign: int = 1

    def parts(self, tables: Sequence[tuple[Tensor, Tensor]], count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and sines `[count, width]` and partners `[width]`, as `KeyRotation` takes them for one layer."""
        cos, sin, partner = torch.ones(count, width), torch.zeros(count, width), torch.arange(width)
        if self.table is not None:
            c, s = (_COLUMNS[self.columns](part).cpu().float() for part in tables[self.table])
            pairs = torch.arange(c.shape[1])
            first = 2 * pairs if self.neighbours else pairs
            second = first + (1 if self.neighbours else len(pairs))
            cos[:, first] = cos[:, second] = c
            sin[:, first], sin[:, second] = -self.sign * s, self.sign * s
            partner[first], partner[second] = second, first
        return cos, sin, partner


@torch.no_grad()
def key_rotation(lm: Any, positions: Sequence[int], window: int) -> KeyRotation:
    """The rotation of an LM's keys to given positions.

    It leaves keys as they are where the LM does: in layers without positions, with learned positions (which are part of
    the hidden states), and with biases for distances (ALiBi).

    Args:
        lm: a transformers causal LM.
        positions: N positions.
        window: number of positions that the LM will use.

    Raises:
        ModelLoadError: if the LM rotates the keys of a layer in an unknown way, or differently in long texts; the
            message names the remedy.
    """
    probes = torch.tensor(sorted({0, window - 1, *(2**i for i in range(window.bit_length()) if 2**i < window)}))
    keys, tables = _probe(lm, probes)
    at_probes = [table(probes) for table in tables]
    forms = [_form(layer.cpu().float(), at_probes, _tolerance(lm)) for layer in keys]
    if None in forms:
        if not tables and _lengths_differ(keys):
            forms = [_Form()] * len(keys)  # learned positions
        else:
            raise ModelLoadError(
                f"{lm.config.model_type} rotates the keys of layer {forms.index(None)} in an unknown way, so keys "
                "before rotation cannot be generated; set modulation.attention_sink to false, or modulation.kind to "
                "lora or film"
            )
    places = torch.tensor(list(positions))
    for index in {form.table for form in forms if form is not None and form.table is not None}:
        _check_long_texts(lm, tables[index], int(places[0]), window)
    at_places = [table(places) for table in tables]
    parts = [form.parts(at_places, len(places), keys.shape[-1]) for form in forms if form is not None]
    cos, sin, partner = (torch.stack(part).to(lm.device) for part in zip(*parts, strict=True))
    return KeyRotation(cos, sin, partner)


def _tolerance(lm: Any) -> float:
    """Largest relative error of a right rotation. That of a wrong one is of the order of 1."""
    return math.sqrt(torch.finfo(lm.get_input_embeddings().weight.dtype).eps)


def _probe(lm: Any, positions: Tensor) -> tuple[Tensor, list[_Table]]:
    """One token alone at each position: its keys `[layers, heads, N, head_width]`, and the tables that rotated them."""
    places = positions[:, None].to(lm.device)
    cache = DynamicCache()
    with _watched(lm, places) as tables:
        # Any token will do except padding, whose embedding may be zero.
        lm(
            input_ids=torch.full_like(places, _some_token(lm.config)),
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return torch.stack([layer[0][:, :, 0].transpose(0, 1) for layer in cache]), tables


def _some_token(config: Any) -> int:
    padding = getattr(config, "pad_token_id", None)
    return next(token for token in range(1, config.vocab_size) if token != padding)


@contextmanager
def _watched(lm: nn.Module, places: Tensor) -> Iterator[list[_Table]]:
    """Records the tables that the LM's rotary embeddings return for positions `[N, 1]` within the context."""
    tables: list[_Table] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if _cos_and_sin(output, len(places)) is not None:
            tables.append(lambda positions: _called_at(positions, places, module, arguments, named))

    handles = [
        module.register_forward_hook(hook, with_kwargs=True)
        for module in lm.modules()
        if "Rotary" in type(module).__name__
    ]
    try:
        yield tables
    finally:
        for handle in handles:
            handle.remove()


def _called_at(
    positions: Tensor, places: Tensor, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Calls a rotary embedding as the LM called it, but in fp32 and with positions `[N]` instead of `places`."""

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():  # the hidden states; the module reads their dtype and device only
            return value[:1].float().expand(len(positions), *value.shape[1:])
        return positions[:, None].to(value.device) if value.shape == places.shape else value

    output = module(*map(changed, arguments), **{name: changed(value) for name, value in named.items()})
    table = _cos_and_sin(output, len(positions))
    assert table is not None
    return table


def _cos_and_sin(output: Any, count: int) -> tuple[Tensor, Tensor] | None:
    """A rotary embedding's output as cosines and sines `[N, columns]`; None if it is something else."""
    if isinstance(output, Tensor) and output.is_complex():
        output = output.real, output.imag
    if not isinstance(output, tuple) or len(output) != 2:
        return None
    if any(not isinstance(part, Tensor) or part.shape[:-1] != (count, 1) for part in output):
        return None
    cos, sin = output
    return cos[:, 0], sin[:, 0]


def _form(keys: Tensor, tables: Sequence[tuple[Tensor, Tensor]], tolerance: float) -> _Form | None:
    """The form that explains one layer's keys `[heads, N, head_width]`; None if none does."""
    count, width = keys.shape[1:]
    forms = [_Form()]
    for index, (cos, _) in enumerate(tables):
        for columns, neighbours, sign in product(_COLUMNS, (False, True), (1, -1)):
            if 2 * _COLUMNS[columns](cos).shape[1] <= width:
                forms.append(_Form(index, columns, neighbours, sign))
    errors = {form: _error(keys, form.parts(tables, count, width)) for form in forms}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] <= tolerance else None


def _error(keys: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> float:
    """Relative error of keys `[heads, N, head_width]` against the first position's key rotated to all positions."""
    cos, sin, partner = (part[None] for part in parts)
    before = KeyRotation(cos[:, :1], sin[:, :1], partner).inverse(keys[None, :, :1])
    turned = KeyRotation(cos, sin, partner)(before.expand(-1, -1, keys.shape[1], -1))
    return float((turned - keys).norm() / keys.norm())


def _lengths_differ(keys: Tensor) -> bool:
    """True if the keys `[layers, heads, N, head_width]` of any head differ in length, which no rotation causes."""
    lengths = keys.float().norm(dim=-1)
    spread = lengths.amax(-1) - lengths.amin(-1)
    return bool((spread > torch.finfo(keys.dtype).eps ** 0.75 * lengths.mean(-1)).any())


def _check_long_texts(lm: Any, table: _Table, position: int, window: int) -> None:
    """Refuses a rotary embedding that rotates the same position differently in long texts."""
    alike = _alike_up_to(table, position, window)
    if alike < window:
        raise ModelLoadError(
            f"{lm.config.model_type} rotates keys differently in texts of more than {alike} tokens, but a prefix is "
            f"made before the length of the text is known; set context_window so that prefix and prompt have at most "
            f"{alike}"
        )


def _alike_up_to(table: _Table, position: int, window: int) -> int:
    """Length of the longest text, up to `window`, in which a position is rotated as in the shortest one."""

    def turn(length: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in table(torch.tensor([position, length - 1])))

    def alike(length: int) -> bool:
        return all(map(torch.equal, turn(length), turn(position + 1)))

    if alike(window):
        return window
    good, bad = position + 1, window
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if alike(middle) else (good, middle)
    return good


@torch.no_grad()
def positions_alike(lm: Any, position: int) -> int:
    """Number of the LM's positions within which a key at this position is rotated alike, however long the text is."""
    window: int = lm.config.max_position_embeddings
    _, tables = _probe(lm, torch.tensor([0, position]))
    return min((_alike_up_to(table, position, window) for table in tables), default=window)
