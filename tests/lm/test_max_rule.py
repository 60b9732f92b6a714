"""Max-rule ensemble decoding against a plain loop over the LM with memory and the LM without."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.decoding import MaxRuleEnsemble
from mac_rag.model import MACModel
from mac_rag.nn.modulation import Modulation
from tests.nn.helpers import EACH, PROMPTS, modulated_lm

Folder = Callable[[str], Path]
WEIGHTS = [0.5, 0.2, 1.0]


def said(lm: BaseLM, prompt: list[int], modulation: Modulation, weight: float, length: int) -> str:
    """Greedy, the whole sequence anew for each token, in probabilities."""
    tokens: list[int] = []
    while len(tokens) < length and (not tokens or tokens[-1] != lm.tokenizer.eos_token_id):
        readings = [lm.answer_logits([prompt], [[*tokens, 0]], each)[-1].softmax(-1) for each in (modulation, None)]
        tokens.append(int(torch.maximum(weight * readings[0], (1 - weight) * readings[1]).argmax()))
    text: str = lm.tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_generation_and_streaming_are_the_plain_loop(model_folder: Folder, name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    with torch.no_grad():
        expected = [
            said(lm, prompt, network(phi[i : i + 1]), weight, 8)
            for i, (prompt, weight) in enumerate(zip(PROMPTS, WEIGHTS, strict=True))
        ]
    assert lm.generate(PROMPTS, network(phi), max_new_tokens=8, weights=WEIGHTS) == expected
    assert expected != lm.generate(PROMPTS, network(phi), max_new_tokens=8)
    for i, prompt in enumerate(PROMPTS):
        pieces = lm.stream(prompt, network(phi[i : i + 1]), max_new_tokens=8, weights=WEIGHTS[i : i + 1])
        assert "".join(pieces) == expected[i]


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_at_several_weights_each_is_what_one_alone_gives(model_folder: Folder, name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    count = len(PROMPTS)
    with torch.no_grad():
        each = lm.generate_each(PROMPTS, network(phi), max_new_tokens=8, weights=[0.0, 0.5, 1.0, 0.2])
        expected = [
            lm.generate(PROMPTS, None, max_new_tokens=8),
            lm.generate(PROMPTS, network(phi), max_new_tokens=8, weights=[0.5] * count),
            lm.generate(PROMPTS, network(phi), max_new_tokens=8),
            lm.generate(PROMPTS, network(phi), max_new_tokens=8, weights=[0.2] * count),
        ]
    assert each == expected
    assert expected[0] != expected[2]


def test_at_several_weights_answers_end_where_they_end(model_folder: Folder) -> None:
    """Each answer ends at its own end, not with the longest, and not at another's."""
    lm, network, phi = modulated_lm(model_folder("llama"), "prefix")
    first = lm.generate_each(PROMPTS, network(phi), max_new_tokens=8, weights=[0.0, 1.0])
    with torch.no_grad():
        third = [int(tokens[0]) for tokens in islice(lm._decode(PROMPTS, None, None), 3)][2]
    lm.end_tokens = [third]
    each = lm.generate_each(PROMPTS, network(phi), max_new_tokens=8, weights=[0.0, 1.0])
    assert each[0] == lm.generate(PROMPTS, None, max_new_tokens=8)
    assert each[1] == lm.generate(PROMPTS, network(phi), max_new_tokens=8)
    assert len(each[0][0]) < len(first[0][0])


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_with_beams_a_batch_is_its_rows(model_folder: Folder, name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    whole = lm.generate(PROMPTS, network(phi), max_new_tokens=6, num_beams=3, weights=WEIGHTS)
    for i, prompt in enumerate(PROMPTS):
        one = lm.generate([prompt], network(phi[i : i + 1]), max_new_tokens=6, num_beams=3, weights=WEIGHTS[i : i + 1])
        assert whole[i : i + 1] == one
    plain = lm.generate(PROMPTS[2:], network(phi[2:]), max_new_tokens=6, num_beams=3)
    assert whole[2:] == plain  # all under the modulation


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 9))
def test_the_two_halves_get_the_same_distribution(weights: list[float], beams: int, seed: int) -> None:
    rows = len(weights) * beams
    scores = torch.randn(2 * rows, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mixed = MaxRuleEnsemble(weights)(torch.zeros(2 * rows, 1), scores)
    assert torch.equal(mixed[:rows], mixed[rows:])
    for row in range(rows):
        weight = weights[row // beams]
        readings = weight * scores[row].softmax(-1), (1 - weight) * scores[rows + row].softmax(-1)
        expected = torch.maximum(*readings)
        assert torch.allclose(mixed[row].exp().double(), expected / expected.sum(), atol=1e-6)


def test_only_questions_behind_documents_are_decoded_by_the_ensemble(tiny_model: MACModel) -> None:
    questions = ["Who opened the bridge?", "What closed the port?"]
    contexts = [["The mayor of Lisbon opened a bridge."], []]
    torch.manual_seed(0)
    phi = torch.randn(2, tiny_model.config.tokens, tiny_model.base_lm.width)
    for parameter in tiny_model.modulation.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain = tiny_model.generate(questions, contexts, modulation=phi)
    alone = tiny_model.generate(questions, contexts)
    assert plain[0] != alone[0]
    tiny_model.config = tiny_model.config.model_copy(update={"memory_weight": 1e-6})
    assert tiny_model.generate(questions, contexts, modulation=phi) == [alone[0], plain[1]]
    for i in range(2):
        pieces = tiny_model.stream(questions[i], contexts[i], modulation=phi[i : i + 1])
        assert "".join(pieces) == [alone[0], plain[1]][i]
