"""The calibration of a model: its fit, its file, and what an engine does with it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from mac_rag.asking import repetition
from mac_rag.config import AttentionConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.model import MACModel
from mac_rag.model.calibration import EVIDENCE, FILE, Calibration, Logistic, read_calibration
from pipelines.tasks.calibrate import fit, guesses, without_answers
from tests.helpers import DEEP

STREAM = generate("val", 40)
QUESTION = STREAM.questions[0].question


@pytest.fixture(scope="module")
def model() -> MACModel:
    return MACModel.from_pretrained("mac-tiny")


@pytest.fixture
def engine(model: MACModel) -> MACEngine:
    engine = MACEngine(model)
    engine.adapt(STREAM.documents)
    return engine


def logistic(**weights: float) -> Logistic:
    return Logistic.model_validate({"weights": weights, "bias": 0.0, "questions": 10, "data": "made up"})


def calibrated(model: MACModel, fitted: Logistic, mode: str = "memory", fingerprint: str | None = None) -> None:
    values = {"fingerprint": fingerprint or model.fingerprint, "modes": {mode: fitted}}
    model.calibration = Calibration.model_validate(values)


@pytest.fixture(autouse=True)
def _uncalibrated(model: MACModel) -> None:
    model.calibration = None


def test_the_fit_finds_the_weights_that_made_the_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    evidence = torch.randn(4000, len(EVIDENCE), generator=generator)
    evidence[:, 1] = 7.0  # never varies
    probability = torch.sigmoid(2 * evidence[:, 0] - evidence[:, 3] + 0.5)
    right = (torch.rand(4000, generator=generator) < probability).tolist()
    fitted = Logistic.fit(evidence, right, "made up")
    assert fitted.weights["prior"] == pytest.approx(2, abs=0.2)
    assert fitted.weights["log_probability"] == pytest.approx(-1, abs=0.15)
    assert fitted.weights["prior_odds"] == 0
    assert fitted.bias == pytest.approx(0.5, abs=0.15)
    # At the optimum, confidence is right on average.
    assert float(fitted.probability(evidence).mean()) == pytest.approx(sum(right) / 4000, abs=1e-5)
    with pytest.raises(ConfigError, match="0 of the 3 answers are right"):  # one kind of answers fits nothing
        Logistic.fit(evidence[:3], [False] * 3, "made up")


@given(st.integers(0, 2**31), st.integers(2, 40))
def test_every_fit_is_an_optimum(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    evidence = torch.randn(count, len(EVIDENCE), generator=generator).double() * 30
    right = [bool(evidence[row, 0] > evidence[:, 0].median()) for row in range(count)]  # separable
    if len(set(right)) == 1:
        return
    fitted = Logistic.fit(evidence, right, "made up")
    said = fitted.probability(evidence)
    assert said.isfinite().all()
    labels = torch.tensor(right, dtype=torch.float32)
    constant = torch.full_like(labels, sum(right) / count)
    assert functional.binary_cross_entropy(said, labels) <= functional.binary_cross_entropy(constant, labels) + 1e-6


def test_the_file_comes_back_and_goes_with_the_checkpoint(model: MACModel, tmp_path: Path) -> None:
    assert read_calibration(tmp_path) is None
    calibrated(model, logistic(prior=0.1 + 0.2, prior_odds=-1.5))
    assert model.calibration is not None
    model.save_pretrained(tmp_path)
    assert read_calibration(tmp_path) == model.calibration
    assert MACModel.from_pretrained(tmp_path).calibration == model.calibration
    calibrated(model, logistic(prior=1.0), fingerprint="0" * 64)  # of other weights
    model.save_pretrained(tmp_path / "other")
    assert read_calibration(tmp_path / "other") is None


GOOD = {"format": 1, "fingerprint": "a" * 64, "modes": {"memory": logistic(prior=1.0).model_dump()}}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        DEEP,
        "\x00",
        json.dumps(GOOD | {"format": 2}),
        json.dumps(GOOD | {"fingerprint": "../../etc"}),
        json.dumps(GOOD | {"more": 1}),
        json.dumps(GOOD | {"modes": {"memory": {"weights": {"unknown": 1.0}, "bias": 0, "questions": 1, "data": ""}}}),
        json.dumps(GOOD).replace('"prior": 1.0', '"prior": NaN'),
        json.dumps(GOOD).replace('"prior": 1.0', '"prior": 1e300'),
        json.dumps(GOOD).replace('"prior": 1.0', '"prior": "x"'),
        json.dumps(GOOD) + " " * (1 << 17),
    ],
)
def test_a_hostile_file_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(GOOD))
    assert read_calibration(tmp_path) is not None
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ModelLoadError, match=r"calibration\.json"):
        read_calibration(tmp_path)


def test_without_a_fit_there_is_no_confidence(engine: MACEngine, model: MACModel) -> None:
    assert engine.answer([QUESTION])[0].confidence is None
    with pytest.raises(ConfigError, match=r"no calibration.*python -m pipelines\.calibrate"):
        engine.answer([QUESTION], min_confidence=0)
    for values, message in (({"fingerprint": "0" * 64}, "other weights"), ({"mode": "documents"}, "from memory alone")):
        calibrated(model, logistic(prior=1.0), **values)
        with pytest.raises(ConfigError, match=message):
            engine.answer([QUESTION], min_confidence=0)
    calibrated(model, logistic(prior=1.0))
    with pytest.raises(ConfigError, match="with documents in front"):
        engine.answer([QUESTION], contexts=[["A storm."]], min_confidence=0)
    for wrong in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="min_confidence is"):
            engine.answer([QUESTION], min_confidence=wrong)


def test_a_guess_below_the_threshold_is_withheld(engine: MACEngine, model: MACModel) -> None:
    calibrated(model, logistic(prior=1.0))
    [plain] = engine.answer([QUESTION])
    [sure] = engine.answer([QUESTION], min_confidence=0)
    assert (sure.text, sure.guess) == (plain.text, None)
    assert sure.confidence is not None
    [at] = engine.answer([QUESTION], min_confidence=sure.confidence)
    assert at == sure
    [above] = engine.answer([QUESTION], min_confidence=math.nextafter(sure.confidence, 1))
    assert (above.text, above.guess, above.confidence) == ("I don't know", plain.text, sure.confidence)


def test_evidence_is_what_it_says(engine: MACEngine, model: MACModel) -> None:
    questions = [question.question for question in STREAM.questions[:5]]
    prompts = [model.fit_to_window(question) for question in questions]
    answers = [answer.text for answer in engine.answer(prompts)]
    evidence = engine.evidence(prompts, answers)
    # The plain way: every document's prior, and one prompt at a time.
    phi = engine.bank.phi
    prior = model.aggregation.prior
    view, encoded = model.project(phi), model._encode(questions)
    scores = prior.queries(encoded) @ view.prior_keys.T
    torch.testing.assert_close(evidence[:, 0], scores.amax(1), rtol=1e-4, atol=1e-5)
    share = (scores * prior.log_scale.exp()).softmax(1).amax(1)
    torch.testing.assert_close(evidence[:, 1], (share / (1 - share + 1e-3)).log(), rtol=1e-3, atol=1e-3)
    aggregated = model.aggregate(questions, phi)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = model.base_lm.prompts.answer(answer)
        logits = model.base_lm.answer_logits([prompt.ids], [ids], model.modulation(aggregated[row : row + 1]))
        said = logits.detach().float().log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        assert evidence[row, 2:4].tolist() == pytest.approx([said[0].item(), said.mean().item()], abs=1e-3)
        assert evidence[row, 4] == 0  # there are no documents
        assert evidence[row, 6] == 0
        assert evidence[row, 5].item() == pytest.approx(repetition(prompt.question, answer))
    allowed = frozenset({STREAM.documents[0].id})
    alone = engine.evidence(prompts, answers, allowed=allowed)
    assert (alone[:, 0] <= evidence[:, 0] + 1e-6).all()
    bare = engine.evidence(prompts, answers, use_memory=False)
    assert not bare[:, :2].any()
    assert bare[:, 2:4].all()
    coarse = MACEngine(model, engine.bank, attention=AttentionConfig(strategy="hierarchical"))
    torch.testing.assert_close(coarse.evidence(prompts, answers)[:, :2], evidence[:, :2], rtol=1e-4, atol=1e-5)


def test_behind_documents_the_lm_alone_is_asked_too(engine: MACEngine, model: MACModel) -> None:
    prompts = [model.fit_to_window(QUESTION), model.fit_to_window(QUESTION, [STREAM.documents[0].text])]
    answers = ["180", "Anna Berg"]
    evidence = engine.evidence(prompts, answers)
    _, alone = model.score_answers(prompts, answers)
    assert evidence[:, 4].tolist() == pytest.approx([0.0, alone[1].item()], abs=1e-4)
    text = f"{QUESTION} So it is. 180 people came."
    [said] = engine.evidence([model.fit_to_window("Who came, and how many people?", [text])], ["180"])[:, 6].tolist()
    assert said == pytest.approx(2 / 6)  # people, came
    assert not engine.evidence(prompts, answers, use_memory=False)[:, 4].any()


def test_repetition_is_of_the_answers_words() -> None:
    asked = "Who opened the bridge, and when?"
    for answer, share in {"Anna Berg": 0.0, "the Bridge!": 1.0, "who, Anna": 0.5, "": 1.0, "the": 1.0}.items():
        assert repetition(asked, answer) == share


def test_answers_are_taken_away_and_the_fit_knows_it(model: MACModel) -> None:
    engine = MACEngine(model)
    found, evidence, mode = guesses(engine, STREAM, 40, seed=0, batch_size=16)
    assert mode == "memory"
    assert [guess.answerable for guess in found] == [True] * 20 + [False] * 20
    assert sum(guess.right for guess in found[:20]) > 10 > sum(guess.right for guess in found[20:])
    model.calibration = fit(engine, found, evidence, mode, "newswire")
    confidence = [engine.answer([guess.question.question], min_confidence=0)[0].confidence or 0 for guess in found[:20]]
    assert sum(confidence) / 20 > 0.5
    texts = {"own": " berg came ", "other": " the bridge of anna berg ", "berger": " berger left "}
    question = STREAM.questions[0].__class__("q", "Who?", ("The Berg",), "own")
    assert without_answers(question, texts) == {"berger"}


@pytest.fixture(scope="module")
def small(mac_small: MACModel) -> MACEngine:
    """An engine whose LM has learned to abstain."""
    small = MACEngine(mac_small)
    small.adapt([Document("a", "Anna Berg opened the bridge in May."), Document("b", "The river floods in spring.")])
    return small


def test_an_abstention_is_known_as_one(small: MACEngine) -> None:
    prompts = [small.model.fit_to_window("Who opened the bridge?")] * 3
    assert small.evidence(prompts, ["i don't know", "I don't know.", "anna berg"])[:, 7].tolist() == [1.0, 1.0, 0.0]


def test_an_lm_that_abstains_says_how_surely_it_answers(engine: MACEngine, model: MACModel, small: MACEngine) -> None:
    asked, text = "Who opened the bridge?", "The river floods in spring."
    prompts = [small.model.fit_to_window(asked), small.model.fit_to_window(asked, [text])]
    phi = small.model.aggregate([asked] * 2, small.bank.phi)
    for memory in (True, False):
        odds = small.evidence(prompts, ["anna berg"] * 2, use_memory=memory)[:, 8]
        for row, prompt in enumerate(prompts):  # the plain way: the next token's probabilities, one prompt at a time
            modulation = small.model._modulation(phi[row : row + 1]) if memory else None
            [token] = small.model.base_lm.abstention or []
            logits = small.model.base_lm.answer_logits([prompt.ids], [[token]], modulation).detach().double()
            abstains = logits.softmax(-1)[0, token].clamp(1e-6, 1 - 1e-6)
            assert odds[row].item() == pytest.approx(((1 - abstains) / abstains).log().item(), abs=1e-2)
    known, unknown = (
        small.evidence([small.model.fit_to_window(question)], ["anna berg"])[0, 8].item()
        for question in (asked, "Who conquered Constantinople in 1453?")
    )
    assert known > unknown + 2
    prompts = [model.fit_to_window(QUESTION)]
    assert not engine.evidence(prompts, ["180"])[:, 8].any()  # mac-tiny has not learned to abstain
