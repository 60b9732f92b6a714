"""An LM abstains where it holds that more probable than all answers together, in every way of answering."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.decoding import AbstainByMajority, abstention_beginning

ABSTENTION = "unknown to the town"
QUESTIONS = ["Who opened the museum?", "When did Ada Voss leave the town of Orsena?"]


@given(
    scores=st.lists(st.floats(-20, 20), min_size=2, max_size=6),
    token=st.integers(0, 5),
    common=st.lists(st.integers(0, 1), max_size=2),
    said=st.lists(st.integers(0, 1), max_size=3),
)
def test_it_needs_half_of_the_probability(scores: list[float], token: int, common: list[int], said: list[int]) -> None:
    token, logits = token % len(scores), torch.tensor([scores])
    before = logits.clone()
    found = AbstainByMajority([*common, token], 3)(torch.tensor([[9, 9, 9, *said]]), logits)
    assert torch.equal(logits, before)
    if said != common or logits.softmax(-1)[0, token] >= 0.5:
        assert torch.equal(found, logits)
    else:
        others = [i for i in range(len(scores)) if i != token]
        assert torch.equal(found[:, others], logits[:, others])
        assert int(found.argmax()) != token


def test_it_remains_where_nothing_else_may_be_said() -> None:
    scores = AbstainByMajority([1], 2)(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[0.0, -9.0, 0.0]]))
    assert int(scores.masked_fill(torch.tensor([[True, False, True]]), -torch.inf).argmax()) == 1


def load(folder: Path, **values: Any) -> BaseLM:
    return BaseLM.load(BaseLMConfig(name=str(folder)), PromptFormat(**values), torch.device("cpu"))


@pytest.mark.parametrize("share", [0.3, 0.49, 0.51, 0.9])
def test_every_way_of_answering(model_folder: Callable[[str], Path], share: float) -> None:
    """The abstention's first token gets a share of the probability: it is the most probable token each time."""
    lm = load(model_folder("llama"), abstention=ABSTENTION, answer="{answer}")
    beginning = abstention_beginning(lm.prompts)
    assert beginning is not None
    (first,) = beginning

    def with_share(_: object, __: object, logits: Tensor) -> Tensor:
        others = logits.clone()
        others[..., first] = -torch.inf
        level = others.logsumexp(-1) + torch.tensor(share / (1 - share)).log()
        return logits.index_copy(-1, torch.tensor([first]), level[..., None])

    handle = lm.model.get_output_embeddings().register_forward_hook(with_share)
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    word = lm.tokenizer.decode([first])
    answers = lm.generate(prompts, None, max_new_tokens=1)
    assert [answer == word for answer in answers] == [share > 0.5] * 2
    assert answers == lm.generate(prompts, None, max_new_tokens=1, num_beams=2)
    assert answers == ["".join(lm.stream(prompt, None, max_new_tokens=1)) for prompt in prompts]
    longer = lm.generate(prompts, None, max_new_tokens=3)
    assert all(answer.endswith(2 * word) for answer in longer)  # behind the first token nothing is changed
    handle.remove()


def test_what_all_answers_begin_with_is_no_abstention(model_folder: Callable[[str], Path]) -> None:
    prompts = load(model_folder("llama"), abstention=ABSTENTION).prompts
    beginning = abstention_beginning(prompts)
    assert beginning == prompts.answer(ABSTENTION)[:2]  # this tokenizer has a token for the space in front of answers
    assert beginning[:1] in [prompts.answer(letter)[:1] for letter in "iklo"]


def test_an_lm_that_has_not_learned_to_abstain(model_folder: Callable[[str], Path]) -> None:
    assert abstention_beginning(load(model_folder("llama")).prompts) is None
