"""Memory tokens beside lexical vectors, and slots of phi*: each equals a network without slots on a smaller bank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from mac_rag.config import AggregationConfig, ModulationConfig
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention, recomputing_attention
from mac_rag.nn.memory_slots import MemorySlots, RankedSlots, heard_slots
from mac_rag.nn.memory_tokens import MemoryTokens
from tests.helpers import mac_config
from tests.nn.helpers import TOKENS, WIDTH, network, random_texts


@pytest.mark.parametrize("lexical_vectors", [0, 2])
def test_texts_are_split_chosen_joined_and_written_in_whole(lexical_vectors: int) -> None:
    rows = torch.randn(4, 3 + lexical_vectors, 5)
    memory = MemoryTokens.split(rows, lexical_vectors)
    assert torch.equal(memory.tokens, rows[:, :3])
    for some in (slice(1, 3), [2, 0], torch.tensor([3, 3, 1])):
        assert torch.equal(memory[some].stacked(), rows[some])
    assert torch.equal(MemoryTokens.cat([memory[2:], memory[:2]]).stacked(), rows[[2, 3, 0, 1]])
    room = memory.new_empty(4)
    room.put([3, 1], memory[:2])
    room.put([0, 2], memory[2:])
    assert torch.equal(room.stacked(), rows[[2, 1, 3, 0]])
    assert memory.to(torch.float64).stacked().dtype == torch.float64
    assert not MemoryTokens.split(rows.clone().requires_grad_(), lexical_vectors).detach().stacked().requires_grad


def one_slot(slots: AggregationNetwork) -> AggregationNetwork:
    """The same network without slots."""
    plain = network()
    plain.load_state_dict({name: value for name, value in slots.state_dict().items() if "slots" not in name})
    return plain


@settings(max_examples=30, deadline=None)
@given(documents=st.integers(1, 6), slots=st.integers(2, 4), seen=st.integers(0, 2**6 - 1), direct=st.booleans())
def test_a_slot_sees_the_bank_without_the_first_documents(documents: int, slots: int, seen: int, direct: bool) -> None:
    built, question, phi = network(slots=slots), random_texts(3), random_texts(documents, seed=1)
    visible = torch.tensor([bool(seen >> place & 1) for place in range(documents)])
    if not visible.any():
        visible[:] = True
    bank = built.project(phi)
    options = {"attention": direct_attention} if direct else {}
    with torch.no_grad():
        got, mass = built(question, bank, mask=visible.expand(3, -1), mass=True, **options)
    assert got.shape == (3, slots * TOKENS, WIDTH)
    plain = one_slot(built)
    scores = plain.prior_scores(question, bank).masked_fill(~visible, -torch.inf)
    weight = torch.stack([block.prior_weights for block in plain.blocks]).mean()
    shares = (weight * scores).softmax(1)
    for i in range(3):
        ranked = [d for d in scores[i].argsort(descending=True).tolist() if visible[d]]
        whole, parts = torch.zeros(documents, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for slot in range(slots):
            left_out = min(slot, len(ranked) - 1)
            mask = visible.clone()
            mask[ranked[:left_out]] = False
            with torch.no_grad():
                alone, alone_mass = plain(question[i : i + 1], bank, mask=mask[None], mass=True)
            torch.testing.assert_close(got[i, slot * TOKENS : (slot + 1) * TOKENS], alone[0])
            share = shares[i, ranked[left_out]].detach()
            whole, parts = whole + share * alone_mass[0], parts + share
        torch.testing.assert_close(mass[i], whole / parts)


@settings(max_examples=30, deadline=None)
@given(documents=st.integers(1, 6), slots=st.integers(2, 4), seen=st.integers(1, 2**6 - 1), sharp=st.floats(0.1, 100))
def test_how_much_less_probable_the_document_of_a_slot_is(documents: int, slots: int, seen: int, sharp: float) -> None:
    visible = [bool(seen >> place & 1) for place in range(documents)]
    visible[0] = visible[0] or not any(visible)
    generator = torch.Generator().manual_seed(seen)
    scores = sharp * torch.randn(documents, generator=generator, dtype=torch.float64)
    built = MemorySlots(slots, WIDTH)
    ranked = built.ranked(built.first(scores.masked_fill(~torch.tensor(visible), -torch.inf)[None]))
    found = built.faintness(ranked.scores)[0]
    ranked = sorted((float(s) for s, v in zip(scores, visible, strict=True) if v), reverse=True)
    expected = [min(ranked[0] - ranked[min(slot, len(ranked) - 1)], 8.0) for slot in range(slots)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_marks_tell_places_and_how_faint_a_slot_is() -> None:
    built, question, bank = network(slots=2), random_texts(2), random_texts(5, seed=1)
    before, _ = built(question, built.project(bank))
    torch.nn.init.normal_(built.slots.places)
    torch.nn.init.normal_(built.slots.faint)
    after, _ = built(question, built.project(bank))
    probabilities = built.prior_scores(question, built.project(bank)).softmax(1).sort(descending=True).values
    faintness = (probabilities[:, 0] / probabilities[:, 1]).log()
    mark = built.slots.places[0] + faintness[:, None] * built.slots.faint
    torch.testing.assert_close(after[:, :TOKENS], before[:, :TOKENS])  # the first slot has none
    torch.testing.assert_close(after[:, TOKENS:], before[:, TOKENS:] + WIDTH**0.5 * mark[:, None])


@settings(max_examples=30, deadline=None)
@given(documents=st.integers(1, 5), cutoff=st.floats(0.01, 8, exclude_max=True), seed=st.integers(0, 99))
def test_slots_beyond_the_cutoff_are_left_out(documents: int, cutoff: float, seed: int) -> None:
    """The others are as they are, and training hears all."""
    torch.manual_seed(seed)
    built, question, texts = network(slots=3).eval(), random_texts(4, seed=seed), random_texts(documents, seed=seed + 1)
    with torch.no_grad():
        bank = built.project(texts)
        whole, whole_mass = built(question, bank, mass=True)
        ranked = built.slots.ranked(built.slots.first(built.prior_scores(question, bank)))
        faintness = built.slots.faintness(ranked.scores)
        trained, _ = built.train()(question, bank)
        built.slots.cutoff = cutoff
        assert torch.equal(built(question, bank)[0], trained)
        phi, mass = built.eval()(question, bank, mass=True)
    heard = heard_slots(phi, TOKENS)
    for number, (kept, expected, faint) in enumerate(zip(phi, whole, faintness, strict=True)):
        count = sum(float(one) <= cutoff for one in faint)
        assert int(heard[number]) == count
        torch.testing.assert_close(kept[: count * TOKENS], expected[: count * TOKENS])
        assert not kept[count * TOKENS :].any()
        if count == 3:
            torch.testing.assert_close(mass[number], whole_mass[number])
    torch.testing.assert_close(mass.sum(1), torch.ones_like(mass[:, 0]))


@pytest.mark.parametrize("hidden", [None, 0], ids=["all", "but-one"])
def test_gradients_reach_the_prior_and_the_marks(hidden: int | None) -> None:
    """And they are numbers, though what a slot or a mask hides has a score of minus infinity."""
    built = network(slots=3)
    torch.nn.init.normal_(built.slots.faint)
    mask = None if hidden is None else (torch.arange(6) != hidden).expand(2, -1)
    phi, _ = built(random_texts(2), built.project(random_texts(6, seed=1)), mask=mask, attention=recomputing_attention)
    weights = torch.randn_like(phi)
    (phi * weights).sum().backward()
    block = built.blocks[0]
    slots = (built.slots.places, built.slots.faint)
    for parameter in (built.prior.query.weight, *slots, block.to_key.weight, block.prior_scale):
        assert isinstance(parameter.grad, Tensor)
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


def test_without_the_prior_all_slots_say_what_one_would() -> None:
    built, question = network(slots=3), random_texts(2)
    torch.nn.init.normal_(built.slots.places)
    bank, visible = built.project(random_texts(5, seed=1)), torch.tensor([True, False, True, True, True]).expand(2, -1)
    built.use_prior = False
    asked: list[int] = []

    def counted(query: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        asked.append(len(query))
        return direct_attention(query, *args, **options)  # type: ignore[arg-type]

    phi, mass = built(question, bank, mask=visible, mass=True, attention=counted)
    assert set(asked) == {2}  # once for all slots
    plain = one_slot(built)
    plain.use_prior = False
    alone, alone_mass = plain(question, bank, mask=visible, mass=True)
    alike = RankedSlots(alone.new_zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    torch.testing.assert_close(phi, built.slots.marked(alone.repeat_interleave(3, 0), alike))
    torch.testing.assert_close(mass, alone_mass)


@pytest.mark.parametrize(
    ("sizes", "kind", "reason"),
    [
        ({"slots": 2, "prior_width": 0}, "prompt", r"slots is 2.*set prior_width"),
        ({"slot_cutoff": 4.0}, "prompt", r"slot_cutoff is 4\.0, but slots is 1"),
        ({"slots": 2, "reading_cutoff": 2.0}, "prompt", r"reading_cutoff is 2\.0, but the LM has not learned to"),
        ({"slots": 2, "slot_cutoff": 4.0}, "prefix", r"slot_cutoff is 4\.0, but with .* kind prefix the LM reads all"),
    ],
)
def test_slots_and_cutoffs_that_cannot_be_are_refused(sizes: dict[str, Any], kind: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        mac_config(
            Path("lm"),
            aggregation=AggregationConfig(**{"prior_width": 8, **sizes}),
            modulation=ModulationConfig(kind=kind, entry_layer=1 if kind == "prompt" else None),
        )
