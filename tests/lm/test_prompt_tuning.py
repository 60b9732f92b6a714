"""A memory that the LM reads as a part of its prompt: against the definition, in batches, ensembles and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.config import AggregationConfig, EncoderConfig, ModulationConfig, PromptFormat
from mac_rag.errors import ModelLoadError
from mac_rag.lm.decoding import abstention_beginning
from mac_rag.model import MACModel
from pipelines.objective import Batch, LossWeights, mac_loss
from tests.helpers import built, mac_config, reloaded

QUESTIONS = ["Which port?", "Who opened a bridge in the town of Lisbon?", "What fell?"]
TEXTS = ["A storm closed the port of Riga.", "The mayor of Lisbon opened a bridge.", "Rain fell.", "Sheep graze."]
CONTEXTS: list[list[str]] = [[], TEXTS[1:2], TEXTS[:3]]
SLOTS, TOKENS = 3, 4


def config(folder: Path, **values: Any) -> Any:
    part = EncoderConfig(design="encoder-pooling", name=None, layers=1, embeddings="base-lm")
    given: dict[str, Any] = {
        "amortization": part,
        "input_encoder": part,
        "modulation": ModulationConfig(kind="prompt", entry_layer=1),
        "prompt": PromptFormat(parallel_documents=True),
        "aggregation": AggregationConfig(blocks=2, heads=2, head_width=8, prior_width=16, slots=SLOTS),
        **values,
    }
    made = mac_config(folder)
    return made.model_copy(update={**given, "tokens": TOKENS})


@pytest.fixture
def model(prefix_lm_folder: Path) -> MACModel:
    model = built(config(prefix_lm_folder), 3)
    with torch.no_grad():
        for parameter in model.modulation.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def defined_loss(model: MACModel, phi: Tensor, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The loss of an answer behind phi* `[S T, D]`, layer by layer, with a mask that is written out token by token."""
    body: Any = model.base_lm.model.bert
    prompts = model.base_lm.prompts
    segments = [*prompts.segment_ids(prompt), *[0] * len(answer)]
    slots = len(phi) // TOKENS
    ends = [TOKENS, *(segments.count(segment) for segment in set(segments) if segment < 0)]
    kinds = [("slot", place // TOKENS) for place in range(len(phi))]
    positions = [place % TOKENS for place in range(len(phi))]
    counted: dict[int, int] = {}
    for segment in segments:
        name = min(segment, 0) if segment < 0 else 1
        kinds.append(("document", name) if name < 0 else ("asked" if segment else "answer", 0))
        place = counted.get(name, 0)
        positions.append(place if name < 0 else max(ends) + place)
        counted[name] = place + 1

    def sees(i: int, j: int) -> bool:
        kind, other = kinds[i], kinds[j]
        if kind[0] == "slot":
            return other == kind or other[0] == "asked"
        if kind[0] == "document":
            return other == kind
        return j <= i or (kind[0] == "asked" and other[0] == "asked")

    length = len(kinds)
    mask = torch.tensor([[sees(i, j) for j in range(length)] for i in range(length)])[None, None]
    ids = torch.tensor([*prompt, *answer])
    words = torch.cat([model.modulation.to_embeddings(phi), body.get_input_embeddings()(ids)])
    states = body.embeddings(inputs_embeds=words[None], position_ids=torch.tensor(positions)[None])
    for number, layer in enumerate(body.encoder.layer):
        if number == 1:
            entered = model.modulation.to_states(phi) + model.modulation.shift
            states = torch.cat([entered[None], states[:, slots * TOKENS :]], 1)
        out = layer(states, attention_mask=mask)
        states = out[0] if isinstance(out, tuple) else out
    logits = model.base_lm.model.get_output_embeddings()(states[0, -len(answer) - 1 : -1])
    return functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")


@torch.no_grad()
@pytest.mark.parametrize("slots", [1, SLOTS])
def test_the_loss_against_the_definition_in_float64(model: MACModel, slots: int) -> None:
    model = model.double()
    phi = torch.randn(3, slots * TOKENS, model.base_lm.width, dtype=torch.float64)
    prompts = [model.base_lm.prompts.prompt(q, c) for q, c in zip(QUESTIONS, CONTEXTS, strict=True)]
    answers = [model.base_lm.prompts.answer(text) for text in ("Riga", "the mayor", "rain")]
    losses = model.base_lm.answer_loss(prompts, answers, model.modulation(phi))
    wanted = [defined_loss(model, *row) for row in zip(phi, prompts, answers, strict=True)]
    torch.testing.assert_close(losses, torch.stack(wanted), check_dtype=False, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_answers_as_its_questions_alone(model: MACModel, dtype: torch.dtype) -> None:
    model.base_lm.to(dtype)
    phi = model.aggregate(QUESTIONS, model.amortize(TEXTS))
    assert phi.shape[1] == SLOTS * TOKENS
    for weight in (1.0, 0.4):
        model.config = model.config.model_copy(update={"memory_weight": weight})
        together = model.generate(QUESTIONS, CONTEXTS, modulation=phi)
        for place, question in enumerate(QUESTIONS):
            own, texts = phi[place : place + 1], CONTEXTS[place]
            alone = model.generate([question], [texts], modulation=own)
            if dtype == torch.float32:
                assert alone == [together[place]]
            assert ["".join(model.stream(question, texts, modulation=own))] == alone


@torch.no_grad()
def test_the_lm_reads_the_slots_alone_that_are_not_left_out(model: MACModel) -> None:
    """Questions of one batch may read one, two or three; the oracle cuts phi* by hand, question by question."""
    slots, bank = model.aggregation.slots, model.amortize(TEXTS)
    model.aggregation.prior.log_scale.fill_(3.0)  # apart, as trained ones are
    whole = model.aggregate(QUESTIONS, bank)
    encoded = model.input_encoder([model.input_encoder.ids(question) for question in QUESTIONS])
    ranked = slots.ranked(slots.first(model.aggregation.prior_scores(encoded, model.project(bank))))
    faintness = slots.faintness(ranked.scores)
    cutoff = float(faintness[:, 1:].flatten().sort().values[2:4].mean())
    counts = (faintness <= cutoff).sum(1).tolist()
    assert len(set(counts)) > 1
    plain = model.config
    aggregation = plain.aggregation.model_copy(update={"slot_cutoff": cutoff})
    model.config, slots.cutoff = plain.model_copy(update={"aggregation": aggregation}), cutoff
    phi = model.aggregate(QUESTIONS, bank)
    assert phi.shape == whole.shape
    assert model.memory_in_prompt(phi) == [count * TOKENS for count in counts]
    prompts = [model.fit_to_window(q, c) for q, c in zip(QUESTIONS, CONTEXTS, strict=True)]
    found = (
        model.generate(prompts, modulation=phi),
        model.generate(prompts, modulation=phi, memory_weight=0.5),
        ["".join(model.stream(p, modulation=phi[i : i + 1])) for i, p in enumerate(prompts)],
        *zip(*model.score_answers(prompts, ["Riga"] * 3, modulation=phi), strict=True),
    )
    model.config, slots.cutoff = plain, None
    cut = [whole[i : i + 1, : count * TOKENS] for i, count in enumerate(counts)]
    for i, (prompt, own) in enumerate(zip(prompts, cut, strict=True)):
        answer, ensemble = (model.generate([prompt], modulation=own, memory_weight=w)[0] for w in (1.0, 0.5))
        assert [part[i] for part in found[:3]] == [answer, ensemble, answer]
        scored = torch.stack(model.score_answers([prompt], ["Riga"], modulation=own))[:, 0]
        torch.testing.assert_close(torch.stack(found[3 + i]), scored, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_look_at_each_slot_alone_ranks_them_anew(prefix_lm_folder: Path) -> None:
    """The oracle asks the LM question by question and slot by slot how probable its abstention is."""
    torch.manual_seed(4)
    sizes = AggregationConfig(blocks=1, heads=2, head_width=8, prior_width=16, slots=SLOTS, reading_cutoff=1.0)
    prompt = PromptFormat(parallel_documents=True, abstention="I don't know")
    model = MACModel.from_config(config(prefix_lm_folder, aggregation=sizes, prompt=prompt), device="cpu")
    for parameter in model.modulation.parameters():
        parameter.add_(torch.randn_like(parameter))
    network, lm, bank = model.aggregation, model.base_lm, model.project(model.amortize(TEXTS))
    slots = network.slots
    network.prior.log_scale.fill_(0.0)  # the prior is not sure
    encoded = model.input_encoder([model.input_encoder.ids(question) for question in QUESTIONS])
    bare = network(encoded, bank)[0].unflatten(1, (SLOTS, TOKENS))  # marks begin as zero
    beginning = abstention_beginning(lm.prompts)
    scores = slots.ranked(slots.first(network.prior_scores(encoded, bank))).scores.clone()
    for number, question in enumerate(QUESTIONS):
        for slot in range(SLOTS):
            logits = lm.answer_logits(
                [lm.prompts.prompt(question)], [beginning], model.modulation(bare[number : number + 1, slot])
            )
            told = logits.double().log_softmax(-1)[torch.arange(len(beginning)), beginning].sum()
            scores[number, slot] += torch.log1p(-told.exp()) - told
    torch.nn.init.normal_(slots.places)
    torch.nn.init.normal_(slots.faint)
    behind = (scores.amax(1, keepdim=True) - scores).flatten()
    slots.reading_cutoff = float(behind[behind > 0].sort().values[:2].mean())
    phi, mass = model.aggregate(QUESTIONS, bank), model.attention(QUESTIONS, bank)
    torch.testing.assert_close(mass.sum(1), torch.ones(len(QUESTIONS)))
    orders = []
    for number, row in enumerate(scores):
        order = sorted(range(SLOTS), key=lambda slot, row=row: -float(row[slot]))  # type: ignore[misc]
        orders.append(order)
        for place, slot in enumerate(order):
            found = phi[number].unflatten(0, (SLOTS, TOKENS))[place]
            faintness = row[order[0]] - row[slot]
            mark = faintness.clamp(max=8) * slots.faint + (slots.places[place - 1] if place else 0)
            expected = bare[number, slot] + mark * bare.shape[-1] ** 0.5
            heard = float(faintness) <= slots.reading_cutoff
            torch.testing.assert_close(found, expected if heard else torch.zeros_like(found), atol=1e-4, rtol=1e-4)
    assert any(order != sorted(order) for order in orders)
    assert len(set(model.memory_in_prompt(phi))) > 1
    assert model.look(QUESTIONS[:1]) is not None
    network.train()
    assert network(encoded, bank, look=lambda *_: pytest.fail("training looks at no slot"))[0].any()


@torch.no_grad()
def test_the_half_of_an_ensemble_without_memory_is_the_lm_alone(model: MACModel) -> None:
    phi = model.aggregate(QUESTIONS, model.amortize(TEXTS))
    prompts = [model.fit_to_window(q, c) for q, c in zip(QUESTIONS, CONTEXTS, strict=True)][1:]
    assert model.generate(prompts, modulation=phi[1:], memory_weight=1e-6) == model.generate(prompts)


def test_gradients_reach_all_of_mac(model: MACModel) -> None:
    model.train()
    model.base_lm.requires_grad_(False)
    batch = Batch(TEXTS[:3], QUESTIONS, ["Riga", "the mayor", "rain"], [0, 1, 2], contexts=CONTEXTS)
    losses, _ = mac_loss(model, batch, LossWeights(answer=1.0, direct=1.0, contrastive=1.0))
    losses["loss"].backward()
    for part in (model.amortization, model.input_encoder, model.aggregation, model.modulation):
        named = {name: p for name, p in part.named_parameters() if p.requires_grad}
        with_gradient = {name for name, p in named.items() if p.grad is not None and bool(p.grad.abs().sum())}
        assert with_gradient, part
    assert model.modulation.to_states.added.weight.grad is not None
    assert model.modulation.to_embeddings.weight.grad is not None


@torch.no_grad()
def test_a_checkpoint_comes_back(model: MACModel, tmp_path: Path) -> None:
    again = reloaded(model, tmp_path / "mac")
    bank = model.amortize(TEXTS)
    assert torch.equal(again.amortize(TEXTS), bank)
    phi = model.aggregate(QUESTIONS, bank)
    assert torch.equal(again.aggregate(QUESTIONS, bank), phi)
    assert again.generate(QUESTIONS, CONTEXTS, modulation=phi) == model.generate(QUESTIONS, CONTEXTS, modulation=phi)


@torch.no_grad()
def test_many_documents_fit_beside_a_memory(model: MACModel) -> None:
    fitted = model.fit_to_window(QUESTIONS[0], TEXTS * 30)
    phi = model.aggregate(QUESTIONS[:1], model.amortize(TEXTS))
    assert model.generate([fitted], modulation=phi)
    long = model.fit_to_window(QUESTIONS[0], ["port " * 2000], overflow="truncate")
    assert long.truncated
    assert model.generate([long], modulation=phi)
    first, mean = model.score_answers([long], ["port " * 300], modulation=phi)
    assert bool((first <= 0).all() & (mean <= 0).all())


class TestRefusals:
    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_an_lm_without_segments(self, model_folder: Any, name: str) -> None:
        plain = mac_config(model_folder(name), modulation=ModulationConfig(kind="prompt", entry_layer=1))
        with pytest.raises(ModelLoadError, match=r"its attention takes no segments.*set modulation.kind to prefix"):
            MACModel.from_config(plain, device="cpu")

    def test_an_entry_behind_the_last_layer(self, prefix_lm_folder: Path) -> None:
        made = config(prefix_lm_folder, modulation=ModulationConfig(kind="prompt", entry_layer=2))
        with pytest.raises(ModelLoadError, match=r"modulation\.entry_layer is 2, but the LM has 2 layers"):
            MACModel.from_config(made, device="cpu")

    def test_configurations(self) -> None:
        with pytest.raises(ValueError, match="entry_layer is None, but kind is prompt"):
            ModulationConfig(kind="prompt")
        with pytest.raises(ValueError, match="entry_layer is 2, but kind is lora"):
            ModulationConfig(kind="lora", entry_layer=2)
        with pytest.raises(ValueError, match="bottleneck is 8, but kind prompt has none"):
            ModulationConfig(kind="prompt", entry_layer=1, bottleneck=8)
