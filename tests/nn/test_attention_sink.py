"""Rotation of keys, against complex numbers in a loop, and the sink in front of a prefix."""

from __future__ import annotations

import cmath
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.nn.modulation import AttentionSink, KeyRotation, LMShape, PrefixTuning

LAYERS, HEADS, WIDTH = 2, 3, 10


def rotation(positions: list[int], pairs: int, neighbours: bool, scale: float) -> KeyRotation:
    """The first layer turns `pairs` pairs of components, the second nothing."""
    angles = torch.tensor(positions)[:, None].double() * 0.7 ** torch.arange(pairs).double()
    cos, sin = torch.ones(LAYERS, len(positions), WIDTH).double(), torch.zeros(LAYERS, len(positions), WIDTH).double()
    partner = torch.arange(WIDTH).repeat(LAYERS, 1)
    for pair in range(pairs):
        first, second = members(pair, pairs, neighbours)
        cos[0, :, first] = cos[0, :, second] = scale * angles[:, pair].cos()
        sin[0, :, first], sin[0, :, second] = -scale * angles[:, pair].sin(), scale * angles[:, pair].sin()
        partner[0, first], partner[0, second] = second, first
    return KeyRotation(cos, sin, partner)


def members(pair: int, pairs: int, neighbours: bool) -> tuple[int, int]:
    return (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + pairs)


def random_keys(count: int) -> Tensor:
    return torch.randn(2, LAYERS, HEADS, count, WIDTH, generator=torch.Generator().manual_seed(1)).double()


settings: dict[str, Any] = {
    "positions": st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    "pairs": st.integers(0, WIDTH // 2),
    "neighbours": st.booleans(),
    "scale": st.floats(0.5, 2),
}


@given(**settings)
def test_a_pair_is_a_complex_number_that_is_turned(
    positions: list[int], pairs: int, neighbours: bool, scale: float
) -> None:
    keys = random_keys(len(positions))
    expected = keys.clone()
    for n, position in enumerate(positions):
        for pair in range(pairs):
            first, second = members(pair, pairs, neighbours)
            before = torch.complex(keys[:, 0, :, n, first], keys[:, 0, :, n, second])
            turned = before * scale * cmath.exp(1j * position * 0.7**pair)
            expected[:, 0, :, n, first], expected[:, 0, :, n, second] = turned.real, turned.imag
    torch.testing.assert_close(rotation(positions, pairs, neighbours, scale)(keys), expected)


@given(**settings)
def test_the_inverse_turns_back(positions: list[int], pairs: int, neighbours: bool, scale: float) -> None:
    turn, keys = rotation(positions, pairs, neighbours, scale), random_keys(len(positions))
    torch.testing.assert_close(turn.inverse(turn(keys)), keys)
    fewer = keys[..., :1, :]  # at the first position only
    torch.testing.assert_close(turn(fewer), turn(keys)[..., :1, :])


def test_a_prefix_is_the_sink_and_the_generated_positions_after_it() -> None:
    tokens, sinks = 3, 2
    turn = rotation(list(range(sinks, sinks + tokens)), 4, False, 1.0)
    sink = AttentionSink(torch.randn(LAYERS, 2, HEADS, sinks, WIDTH).double(), turn)
    shape = LMShape(LAYERS, HEADS, WIDTH, 16, {}, (), "")
    torch.manual_seed(0)
    with_sink = PrefixTuning(shape, tokens, 16, sink=sink).double()
    plain = PrefixTuning(shape, tokens, 16).double()
    plain.load_state_dict(with_sink.state_dict())  # the sink is the LM's, so both have the same weights
    phi = torch.randn(2, tokens, 16).double()
    found, generated = with_sink(phi), plain(phi)
    assert found.prefix_length == with_sink.prefix_length == sinks + plain.prefix_length == sinks + tokens
    for layer, generated_layer, own, n in zip(
        found.cache(torch.float64), generated.cache(torch.float64), sink.keys_values, range(LAYERS), strict=True
    ):
        keys, values = layer[0], layer[1]
        torch.testing.assert_close(keys[:, :, :sinks], own[0].expand(2, -1, -1, -1))
        torch.testing.assert_close(values[:, :, :sinks], own[1].expand(2, -1, -1, -1))
        torch.testing.assert_close(values[:, :, sinks:], generated_layer[1])
        turned = turn(torch.stack([generated_layer[0]] * LAYERS, 1))[:, n]
        torch.testing.assert_close(keys[:, :, sinks:], turned)
