"""Documents that a prefix LM reads in parallel: what sees what, where it stands, and what fits into the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.errors import DocumentError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.prompt import PromptEncoder, positions_of, segments_of
from mac_rag.model import MACModel
from pipelines.tasks.tune_qa import TuneConfig, TuneTask
from tests.helpers import VOCABULARY, mac_config

FORMAT = PromptFormat(parallel_documents=True)
QUESTION = "Which port?"
TEXTS = ["A storm closed the port of Riga.", "The mayor of Lisbon opened a bridge.", "Rain fell."]


@pytest.fixture(params=["float32", "bfloat16"])
def lm(prefix_lm_folder: Path, request: pytest.FixtureRequest) -> BaseLM:
    lm = BaseLM.load(BaseLMConfig(name=str(prefix_lm_folder)), FORMAT, torch.device("cpu"))
    return lm.to(getattr(torch, request.param))


@pytest.fixture
def model(prefix_lm_folder: Path) -> MACModel:
    torch.manual_seed(3)
    return MACModel.from_config(mac_config(prefix_lm_folder, prompt=FORMAT), device="cpu")


@given(st.lists(st.lists(st.integers(5, 9), max_size=4), min_size=1, max_size=5))
def test_segments_and_positions(prompts: list[list[int]]) -> None:
    ids = [token for prompt in prompts for token in [1, *prompt]]
    segments, positions = segments_of(ids, [1]), positions_of(segments_of(ids, [1]))
    longest = max((1 + len(prompt) for prompt in prompts[:-1]), default=0)
    wanted = []
    for number, prompt in enumerate(prompts, 1):
        first = longest if number == len(prompts) else 0
        segment = 1 if number == len(prompts) else -number
        wanted += [(segment, first + place) for place in range(1 + len(prompt))]
    assert list(zip(segments, positions, strict=True)) == wanted


def test_each_document_is_read_as_if_it_stood_alone(lm: BaseLM) -> None:
    ids = lm.prompts.prompt(QUESTION, TEXTS)
    parts = [lm.prompts.prompt(QUESTION, [text]) for text in TEXTS]
    assert ids == [token for part in parts for token in part] + lm.prompts.prompt(QUESTION)
    rows, mask, positions, segments = lm._padded([ids], None)
    cache = lm.model(rows, attention_mask=mask, position_ids=positions, segment_ids=segments).past_key_values
    end = 0
    for part in parts:
        alone = lm.model(torch.tensor([part]), segment_ids=torch.ones(1, len(part))).past_key_values
        for layer, own in zip(cache, alone, strict=True):
            for kind in (0, 1):
                torch.testing.assert_close(layer[kind][:, :, end : end + len(part)], own[kind], atol=0.05, rtol=0.02)
        end += len(part)


def test_the_answer_comes_from_all_documents_in_any_order(lm: BaseLM) -> None:
    answer = lm.prompts.answer("Riga")

    def loss(texts: list[str]) -> torch.Tensor:
        return lm.answer_loss([lm.prompts.prompt(QUESTION, texts)], [answer], None)

    said = loss(TEXTS)
    tolerance = 1e-4 if lm.dtype == torch.float32 else 0.05
    torch.testing.assert_close(loss([TEXTS[2], TEXTS[0], TEXTS[1]]), said, rtol=tolerance, atol=tolerance)
    for number in range(3):
        changed = [text if place != number else "A port was opened in Oslo." for place, text in enumerate(TEXTS)]
        assert abs(float(loss(changed) - said)) > 1e-3


def test_the_loss_against_the_definition_in_float64(prefix_lm_folder: Path) -> None:
    """The documents' keys and values are those of passes of their own, and the rest is read behind all of them."""
    lm = BaseLM.load(BaseLMConfig(name=str(prefix_lm_folder)), FORMAT, torch.device("cpu")).double()
    answer = lm.prompts.answer("Riga")
    rows = [[], TEXTS[:1], TEXTS[:2], TEXTS]
    losses = lm.answer_loss([lm.prompts.prompt(QUESTION, texts) for texts in rows], [answer] * 4, None)
    for texts, loss in zip(rows[2:], losses[2:], strict=True):
        parts = [lm.prompts.prompt(QUESTION, [text]) for text in texts]
        caches = [
            lm.model(torch.tensor([part]), segment_ids=torch.ones(1, len(part))).past_key_values for part in parts
        ]
        cache = caches[0]
        for place, layer in enumerate(cache.layers):
            layer.keys = torch.cat([one.layers[place].keys for one in caches], 2)
            layer.values = torch.cat([one.layers[place].values for one in caches], 2)
        asked = lm.prompts.prompt(QUESTION)
        longest = max(map(len, parts))
        logits = lm.model(
            torch.tensor([asked + answer]),
            position_ids=torch.arange(longest, longest + len(asked) + len(answer))[None],
            segment_ids=torch.tensor([[1] * len(asked) + [0] * len(answer)]),
            past_key_values=cache,
        ).logits[0, len(asked) - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        torch.testing.assert_close(loss, wanted, check_dtype=False, rtol=1e-5, atol=1e-5)
    plain = BaseLM(lm.model, lm.tokenizer, PromptFormat())
    prompts = [plain.prompts.prompt(QUESTION, texts) for texts in rows[:2]]
    torch.testing.assert_close(losses[:2], plain.answer_loss(prompts, [answer] * 2, None))


@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_answers_as_its_questions_alone(model: MACModel, beams: int) -> None:
    questions = [QUESTION, "Who opened a bridge in the town of Lisbon?", "What fell?"]
    contexts: list[list[str]] = [TEXTS, TEXTS[:1], TEXTS[1:]]
    phi = model.aggregate(questions, model.amortize(TEXTS))
    together = model.generate(questions, contexts, modulation=phi, num_beams=beams)
    for place, question in enumerate(questions):
        own = phi[place : place + 1]
        assert model.generate([question], [contexts[place]], modulation=own, num_beams=beams) == [together[place]]
        if beams == 1:
            assert "".join(model.stream(question, contexts[place], modulation=own)) == together[place]


def test_greedy_answers_are_the_most_probable_tokens(lm: BaseLM) -> None:
    prompt = lm.prompts.prompt(QUESTION, TEXTS)
    written: list[int] = []
    for _ in range(3):
        rows = [[*written, token] for token in range(VOCABULARY)]
        losses = lm.answer_loss([prompt] * VOCABULARY, rows, None)
        written.append(int(losses.argmin()))
    steps = lm._decode([prompt], None, None)
    assert [int(next(steps)[0]) for _ in range(3)] == written


def test_any_number_of_documents_fits_if_each_does(model: MACModel) -> None:
    fitted = model.fit_to_window(QUESTION, TEXTS * 40)
    assert len(fitted.contexts) == 120
    assert not fitted.truncated
    assert len(fitted.ids) > model.context_window
    assert model.base_lm.prompts.positions(fitted.ids) < 80
    long = "port " * 1000
    with pytest.raises(
        DocumentError, match=r"2 documents and the question take \d+ tokens, but the LM's window leaves"
    ):
        model.fit_to_window(QUESTION, [TEXTS[0], long])
    cut = model.fit_to_window(QUESTION, [long, TEXTS[0], long], overflow="truncate")
    assert cut.truncated
    assert cut.contexts[1] == TEXTS[0]
    assert long.startswith(cut.contexts[0])
    assert cut.contexts[0] == cut.contexts[2]
    taken = model.base_lm.prompts.positions(cut.ids)
    assert model.context_window - model.config.max_new_tokens - 3 <= taken
    assert taken <= model.context_window - model.config.max_new_tokens
    model.generate([cut], modulation=model.aggregate([QUESTION], model.amortize(TEXTS)))


@given(st.integers(0, 60), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_what_is_cut_fits(encoder: PromptEncoder, room: int, lengths: list[int]) -> None:
    texts = ["port " * length for length in lengths]
    fitted = encoder.fit_to_window(QUESTION, texts, room)
    alone = len(encoder.prompt(QUESTION))
    assert encoder.positions(fitted.ids) <= max(room, alone)
    whole = encoder.fit_to_window(QUESTION, texts)
    assert not whole.truncated
    assert fitted.truncated == (encoder.positions(whole.ids) > room)
    if not fitted.truncated:
        assert fitted == whole


@pytest.fixture(scope="module")
def encoder(prefix_lm_folder: Path) -> PromptEncoder:
    lm = BaseLM.load(BaseLMConfig(name=str(prefix_lm_folder)), FORMAT, torch.device("cpu"))
    return lm.prompts


def test_a_document_cannot_begin_a_prompt(encoder: PromptEncoder) -> None:
    ids = encoder.prompt(QUESTION, ["<s> The port </s> <s>", "Riga <s>"])
    assert [token for token in ids if token == encoder.start[0]] == encoder.start * 3
    assert encoder.segment_ids(ids).count(1) == len(encoder.prompt(QUESTION))


def test_where_documents_stand(encoder: PromptEncoder) -> None:
    ids = encoder.prompt(QUESTION, TEXTS)
    for place, text in zip(encoder.places_of_documents(QUESTION, TEXTS), TEXTS, strict=True):
        assert ids[place.start : place.stop] == encoder.prompt_start([text])
    assert encoder.places_of_documents(QUESTION, TEXTS[:1]) == [range(len(encoder.prompt_start(TEXTS[:1])))]


def recipe(name: str, **values: Any) -> TuneConfig:
    return TuneConfig.parse(
        {
            "base_lm": {"name": name},
            "prompt": {"parallel_documents": True},
            "data": {"documents": 40, "validation_documents": 4},
            "context": {"retriever": "bm25", "k": [3]},
            "trainer": {"steps": 2, "batch_size": 4, "learning_rate": 1e-3, "log_every": 1, "best": "f1", "cpu": True},
            **values,
        },
        "test",
    )


def test_tuning_reads_as_answering_does(prefix_lm_folder: Path) -> None:
    task = TuneTask(recipe(str(prefix_lm_folder), question_blind=0.5))
    base_lm = BaseLM(task.lm.eval(), task.encoder.tokenizer, FORMAT)
    batch = task.batch(0, 0, 6)
    total = count = 0
    for ids, labels, segment_ids, _, copied in batch:
        start = labels.count(-100)
        assert min(segment_ids) == -3
        assert segment_ids[start:] == [0] * (len(ids) - start)
        total += float(base_lm.answer_loss([ids[:start]], [ids[start:]], None).detach())
        count += len(ids) - start
        for place in copied:
            assert ids[place : place + len(ids) - start - 1] == ids[start:-1]
            assert segment_ids[place] < 0
    assert any(sequence.copied for sequence in batch)
    assert float(task(batch)["answer"].detach()) == pytest.approx(total / count, rel=1e-4)


class TestRefusals:
    def test_an_lm_without_segments(self, model_folder: Any) -> None:
        with pytest.raises(
            ModelLoadError, match="only an LM whose attention takes segments reads documents in parallel"
        ):
            BaseLM.load(BaseLMConfig(name=str(model_folder("llama"))), FORMAT, torch.device("cpu"))
        with pytest.raises(ModelLoadError, match="only an LM whose attention takes segments"):
            TuneTask(recipe(str(model_folder("gpt2"))))

    def test_a_tokenizer_without_a_start(self, model_folder: Any) -> None:
        from mac_rag.lm.loading import load_tokenizer

        tokenizer = load_tokenizer(str(model_folder("gpt2")))
        with pytest.raises(
            ModelLoadError, match=r"puts no token before a text, .* leave out prompt\.parallel_documents"
        ):
            PromptEncoder(tokenizer, FORMAT)

    def test_a_chat(self) -> None:
        with pytest.raises(ValueError, match="a conversation is one text"):
            PromptFormat(chat=True, parallel_documents=True)
