"""Modulations: a prefix is a text, LoRA is merged weights, the LM stays as it was, keys of a prefix are turned."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.config import ModulationConfig
from mac_rag.nn.modulation import AttentionSink, FiLM, KeyRotation, LMShape, LoRA, PrefixModulation, PrefixTuning
from tests.helpers import Folder
from tests.nn.helpers import ANSWERS, EACH, LM_TOKENS, PROMPTS, modulated_lm


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prefix_that_is_a_text_is_that_text(model_folder: Folder, name: str) -> None:
    """Keys and values of real tokens, given as a prefix, are the same as those tokens in front."""
    lm, _, _ = modulated_lm(model_folder(name), "prefix")
    text, rest, answer = [1, 30, 31, 32], [40, 41], [60, 2]

    cache = lm.model(input_ids=torch.tensor([text]), use_cache=True).past_key_values
    prefix = PrefixModulation(torch.stack([torch.stack(layer[:2], 1) for layer in cache], 1))
    in_front = lm.answer_loss([text + rest], [answer], None)
    torch.testing.assert_close(lm.answer_loss([rest], [answer], prefix), in_front)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lora_is_the_lm_with_merged_weights(model_folder: Folder, name: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), "lora")
    modulated = lm.answer_loss(PROMPTS, ANSWERS, network(phi))
    normed = network.norm(phi)
    downs, ups = network.to_a(normed).split(network.inputs, -1), network.to_b(normed).split(network.outputs, -1)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        updates = [network.scale * up[i].T @ down[i] / down.shape[-1] ** 0.5 for down, up in zip(downs, ups)]
        before = {name: weight.clone() for name, weight in lm.model.state_dict().items()}
        for module, update in zip(map(lm.model.get_submodule, network.names), updates, strict=True):
            module.weight.data += update if name == "llama" else update.T
        torch.testing.assert_close(lm.answer_loss([prompt], [answer], None), modulated[i : i + 1])
        lm.model.load_state_dict(before)


@pytest.mark.parametrize("kind", ["lora", "film"])
def test_lora_and_film_start_as_the_lm_itself(model_folder: Folder, kind: str) -> None:
    lm, _, phi = modulated_lm(model_folder("llama"), kind)
    shape = lm.shape(ModulationConfig(kind=kind))  # type: ignore[arg-type]
    fresh = (LoRA(shape, LM_TOKENS, lm.width) if kind == "lora" else FiLM(shape, lm.width)).double()
    alone = lm.answer_loss(PROMPTS, ANSWERS, None)
    torch.testing.assert_close(lm.answer_loss(PROMPTS, ANSWERS, fresh(phi)), alone)


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_the_lm_is_left_as_it_was(model_folder: Folder, name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    before = lm.generate(PROMPTS, None, max_new_tokens=6)
    lm.generate(PROMPTS, network(phi), max_new_tokens=6)
    assert lm.generate(PROMPTS, None, max_new_tokens=6) == before
    assert not any(module._forward_hooks for module in lm.model.modules())


def test_a_prefix_with_a_bottleneck(model_folder: Folder) -> None:
    lm, network, phi = modulated_lm(model_folder("llama"), "prefix", bottleneck=6)
    assert network(phi).prefix_length == LM_TOKENS
    assert lm.generate(PROMPTS, network(phi), max_new_tokens=4)


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
def test_a_pair_is_a_turned_complex_number(positions: list[int], pairs: int, neighbours: bool, scale: float) -> None:
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
