"""Modulations: in a batch, in generation, with beams and padding, each row is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mac_rag.config import ModulationConfig
from mac_rag.nn.modulation import LoRA, PrefixModulation
from tests.nn.helpers import ANSWERS, EACH, LM_TOKENS, PROMPTS, modulated_lm


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_batched_losses_are_the_losses_one_by_one(model_folder: Callable[[str], Path], name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    whole = lm.answer_loss(PROMPTS, ANSWERS, network(phi))
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        one = lm.answer_loss([prompt], [answer], network(phi[i : i + 1]))
        torch.testing.assert_close(whole[i : i + 1], one)
    assert not torch.allclose(whole, lm.answer_loss(PROMPTS, ANSWERS, None))


@pytest.mark.parametrize(("name", "kind"), EACH)
@pytest.mark.parametrize("beams", [1, 3])
def test_batched_generation_is_generation_one_by_one(
    model_folder: Callable[[str], Path], name: str, kind: str, beams: int
) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    options = {"max_new_tokens": 8, "num_beams": beams}
    whole = lm.generate(PROMPTS, network(phi), **options)
    ones = [lm.generate([prompt], network(phi[i : i + 1]), **options)[0] for i, prompt in enumerate(PROMPTS)]
    assert whole == ones
    assert whole != lm.generate(PROMPTS, None, **options)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["prefix", "lora", "film"])
def test_generation_is_a_greedy_loop_without_a_cache(model_folder: Callable[[str], Path], name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    generated = lm.generate(PROMPTS, network(phi), max_new_tokens=6)
    for i, prompt in enumerate(PROMPTS):
        tokens: list[int] = []
        while len(tokens) < 6 and (not tokens or tokens[-1] != lm.tokenizer.eos_token_id):
            # The loss of every possible next token, from the whole sequence anew each time.
            candidates = [[*tokens, token] for token in range(lm.model.config.vocab_size)]
            rows = [prompt] * len(candidates)
            losses = lm.answer_loss(rows, candidates, network(phi[i : i + 1].expand(len(candidates), -1, -1)))
            tokens.append(int(losses.argmin()))
        assert generated[i] == lm.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_streamed_pieces_are_the_generated_answer(model_folder: Callable[[str], Path], name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    for i, prompt in enumerate(PROMPTS):
        pieces = list(lm.stream(prompt, network(phi[i : i + 1]), max_new_tokens=8))
        assert "".join(pieces) == lm.generate([prompt], network(phi[i : i + 1]), max_new_tokens=8)[0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prefix_that_is_a_text_is_that_text(model_folder: Callable[[str], Path], name: str) -> None:
    """Keys and values of real tokens, given as a prefix, are the same as those tokens in front."""
    lm, _, _ = modulated_lm(model_folder(name), "prefix")
    text, rest, answer = [1, 30, 31, 32], [40, 41], [60, 2]

    cache = lm.model(input_ids=torch.tensor([text]), use_cache=True).past_key_values
    prefix = PrefixModulation(torch.stack([torch.stack(layer[:2], 1) for layer in cache], 1))
    in_front = lm.answer_loss([text + rest], [answer], None)
    torch.testing.assert_close(lm.answer_loss([rest], [answer], prefix), in_front)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lora_is_the_lm_with_merged_weights(model_folder: Callable[[str], Path], name: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), "lora")
    assert isinstance(network, LoRA)
    modulated = lm.answer_loss(PROMPTS, ANSWERS, network(phi))
    normed = network.norm(phi)
    downs, ups = network.to_a(normed).split(network.inputs, -1), network.to_b(normed).split(network.outputs, -1)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        updates = [
            network.scale * up[i].T @ down[i] / down.shape[-1] ** 0.5 for down, up in zip(downs, ups, strict=True)
        ]
        for module, update in zip(map(lm.model.get_submodule, network.names), updates, strict=True):
            module.weight.data += update if module.weight.shape == update.shape and name == "llama" else update.T
        torch.testing.assert_close(lm.answer_loss([prompt], [answer], None), modulated[i : i + 1])
        for module, update in zip(map(lm.model.get_submodule, network.names), updates, strict=True):
            module.weight.data -= update if module.weight.shape == update.shape and name == "llama" else update.T


@pytest.mark.parametrize("kind", ["lora", "film"])
def test_lora_and_film_start_as_the_lm_itself(model_folder: Callable[[str], Path], kind: str) -> None:
    lm, trained, phi = modulated_lm(model_folder("llama"), kind)
    fresh = type(trained)(*((lm.shape(ModulationConfig(kind=kind)), LM_TOKENS, lm.width) if kind == "lora"  # type: ignore[arg-type]
                            else (lm.shape(ModulationConfig(kind=kind)), lm.width))).double()  # fmt: skip
    alone = lm.answer_loss(PROMPTS, ANSWERS, None)
    torch.testing.assert_close(lm.answer_loss(PROMPTS, ANSWERS, fresh(phi)), alone)


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_the_lm_is_left_as_it_was(model_folder: Callable[[str], Path], name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    before = lm.generate(PROMPTS, None, max_new_tokens=6)
    lm.generate(PROMPTS, network(phi), max_new_tokens=6, num_beams=2)
    assert lm.generate(PROMPTS, None, max_new_tokens=6) == before
    assert not any(module._forward_hooks for module in lm.model.modules())


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_gradients_reach_phi(model_folder: Callable[[str], Path], name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    phi.requires_grad_(True)
    lm.answer_loss(PROMPTS, ANSWERS, network(phi)).sum().backward()
    assert phi.grad is not None
    assert phi.grad.flatten(1).norm(dim=1).gt(0).all()


def test_a_prefix_with_a_bottleneck(model_folder: Callable[[str], Path]) -> None:
    lm, network, phi = modulated_lm(model_folder("llama"), "prefix", bottleneck=6)
    assert network(phi).prefix_length == LM_TOKENS
    assert lm.generate(PROMPTS, network(phi), max_new_tokens=4)
