"""The published protocol: its scores worked out by hand, its beams against a plain search, its choice of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.harness.protocol import run_protocol
from eval.harness.published import departures, scores, searched, shuffled_choice, with_memory
from eval.harness.results import Data, Row, published_lm
from eval.harness.scales import Protocol
from eval.harness.systems import MACSystem
from eval.report.catalogue import CATALOGUE
from eval.report.collect import ResultFile
from eval.report.summary import about
from eval.report.tables import table
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.engine import MACEngine
from mac_rag.model import MACModel
from pipelines.sizes import architecture
from tests.eval.helpers import Command, Evaluate, result

# Prediction, accepted answers; EM and F1 by the published functions; EM and F1 by ours.
BY_HAND: list[tuple[str, tuple[str, ...], float, float, float, float]] = [
    # "golden gate bridge in san francisco" begins with the shortest answer; 3 of 6 words, all 3 found: 2 * 1/2 / (3/2).
    ("the Golden Gate Bridge in San Francisco", ("Golden Gate Bridge", "The Golden Gate Bridge, California"),
     1, 2 / 3, 0, 2 / 3),
    # Shorter than the answer, so its beginning is not the answer; 1 of 1 word, 1 of 2 found.
    ("Anna", ("Anna Berg",), 0, 2 / 3, 0, 2 / 3),
    # The beginning of a longer word counts as a match, but no word is shared.
    ("Annabelle", ("Anna",), 1, 0, 0, 0),
    # Only the shortest answer counts: "may 2004" does not begin with "2004"; 1 of 2 words, 1 of 1 found.
    ("May 2004", ("in May 2004", "May 2004", "2004"), 0, 2 / 3, 1, 1),
    # Case, punctuation and articles do not count: "usa" and "usa".
    ("The U.S.A.!", ("the USA",), 1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "answers", "em", "f1", "our_em", "our_f1"), BY_HAND)
def test_scores_by_hand(
    prediction: str, answers: tuple[str, ...], em: float, f1: float, our_em: float, our_f1: float
) -> None:
    question = Question("q", "?", answers, "d")
    published, ours = scores("published", prediction, question), scores("strict", prediction, question)
    assert (published["em"], published["f1"]) == (em, pytest.approx(f1))
    assert (ours["em"], ours["f1"]) == (our_em, pytest.approx(our_f1))
    assert published["em_prefix"] == em


def plain_search(model: MACModel, prompt: list[int], groups: int, size: int, penalty: float, new: int) -> list[int]:
    """Diverse beam search of one prompt, which reads everything again in each step."""
    lm, ends = model.base_lm.model, set(model.base_lm.end_tokens)
    beams = [[([], 0.0 if beam == 0 else -1e9) for beam in range(size)] for _ in range(groups)]
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(groups)]
    for length in range(1, new + 1):
        taken: list[int] = []
        for group in range(groups):
            if len(ended[group]) == size:
                taken += [model.base_lm.tokenizer.pad_token_id] * size
                continue
            candidates = []
            for said, total in beams[group]:
                logits = lm(input_ids=torch.tensor([prompt + said])).logits[0, -1].float().log_softmax(-1)
                for token, value in enumerate(logits.tolist()):
                    candidates.append((total + value - penalty * taken.count(token), said, token))
            candidates.sort(key=lambda candidate: -candidate[0])
            beams[group] = []
            for rank, (total, said, token) in enumerate(candidates):
                if token not in ends:
                    beams[group].append(([*said, token], total))
                elif rank < size:
                    ended[group] = sorted([*ended[group], (total / length, said)], key=lambda e: -e[0])[:size]
                if len(beams[group]) == size:
                    break
            taken += [said[-1] for said, _ in beams[group]]
        if all(len(answers) == size for answers in ended):
            break
    for group in range(groups):
        if len(ended[group]) < size:
            ended[group] += [(total / len(said), said) for said, total in beams[group]]
            ended[group] = sorted(ended[group], key=lambda e: -e[0])[:size]
    return max((answer for answers in ended for answer in answers), key=lambda answer: answer[0])[1]


@pytest.mark.parametrize(("groups", "size", "penalty"), [(4, 3, 10.0), (3, 2, 0.3), (1, 3, 0.0)])
def test_beams_are_those_of_a_plain_search(tiny_model: MACModel, groups: int, size: int, penalty: float) -> None:
    """Rows of other lengths in one batch; logits are sharpened so that some answers end early."""
    base_lm = tiny_model.base_lm
    with torch.no_grad():
        base_lm.model.get_output_embeddings().weight.mul_(8)
    prompts = [
        base_lm.prompts.prompt(text) for text in ("Who opened the harbour?", "Which town?", "When was it, then?")
    ]
    found = searched(base_lm, prompts, groups=groups, size=size, penalty=penalty, most=5)
    with torch.no_grad():
        expected = [plain_search(tiny_model, prompt, groups, size, penalty, 5) for prompt in prompts]
    assert found == [base_lm.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in expected]


def test_a_choice_is_shuffled_and_keeps_articles_together() -> None:
    documents = tuple(Document(f"a{a}_{n}", f"{a} {n}", {"title": f"t{a}"}) for a in range(30) for n in (2, 0, 1))
    questions = tuple(Question(f"q{d.id}", "?", ("x",), d.id) for d in documents)
    for name, order in (("archivalqa", [0, 1, 2]), ("squad", [2, 0, 1])):
        dataset = QADataset(name, "test", documents, questions)
        chosen = shuffled_choice(dataset, 9, seed=1)
        assert [int(document.id[-1]) for document in chosen.documents] == order * 3
        articles = [document.id.split("_")[0] for document in chosen.documents]
        assert len(dict.fromkeys(articles)) == 3
        assert articles[::3] != ["a0", "a1", "a2"]
        assert [question.document_id for question in chosen.questions] == [d.id for d in chosen.documents]
        assert chosen == shuffled_choice(dataset, 9, seed=1)
        assert chosen != shuffled_choice(dataset, 9, seed=2)
    alone = shuffled_choice(QADataset("streamingqa", "test", documents, questions), None, seed=1)
    assert {d.id for d in alone.documents} == {d.id for d in documents}
    assert [d.id for d in alone.documents[:3]] != [d.id for d in documents[:3]]


@pytest.mark.parametrize("protocol", ["strict", "published"])
def test_a_long_article_is_cut_under_the_published_protocol_alone(tiny_model: MACModel, protocol: Protocol) -> None:
    """The bank then has the memory of its beginning, in a comparison as in a benchmark; else that of all of it."""
    long = Document("d", " ".join(f"storm {number}" for number in range(900)))
    chunks = tiny_model.amortization.split(long.text)
    assert len(chunks) > 1
    system, engine = MACSystem(tiny_model, protocol=protocol), MACEngine(tiny_model)
    system.adapt([long])
    run_protocol(engine, QADataset("own", "test", (long,), (Question("q", "Storm?", ("no",), "d"),)), protocol=protocol)
    expected = tiny_model.amortize(chunks[:1] if protocol == "published" else chunks)
    for bank in (system.engine.bank, engine.bank):
        torch.testing.assert_close(bank.phi.to(expected.dtype), expected, rtol=0, atol=0.02)


def test_the_published_protocol_of_a_benchmark(evaluate: Evaluate, tiny_checkpoint: Path) -> None:
    """Answers are those of the diverse beams for the memory and for retrieved documents, and the result says so."""
    options = ("--documents", 4, "--retriever", "bm25", "--k", 1, "--seed", 3, "--protocol", "published")
    evaluated = evaluate("streamingqa", *options)
    chosen = shuffled_choice(generate("test", 4, seed=3), 4, seed=3)
    assert [sample.question for sample in evaluated.samples] == [question.question for question in chosen.questions]
    model = MACModel.from_pretrained(str(tiny_checkpoint), device="cpu")
    memory = model.amortize([document.text for document in chosen.documents])
    asked = [question.question for question in chosen.questions]
    phi = model.aggregate(asked, memory)
    assert [sample.rows["MAC"].prediction for sample in evaluated.samples] == with_memory(model, asked, phi)
    assert [sample.rows["LM alone"].prediction for sample in evaluated.samples] == with_memory(model, asked, None)
    contexts = [
        next(d.text for d in chosen.documents if d.id == s.rows["bm25 top-1"].retrieved[0]) for s in evaluated.samples
    ]
    fitted = [model.fit_to_window(q, [text], overflow="truncate") for q, text in zip(asked, contexts, strict=True)]
    assert [s.rows["bm25 top-1 + MAC"].prediction for s in evaluated.samples] == with_memory(model, fitted, phi)
    assert evaluated.result.protocol == "published"
    assert evaluated.result.notes == (departures("published", model)[0],)
    assert "question alone" in evaluated.result.notes[0]
    strict = evaluate("streamingqa", "--documents", 1)
    assert (strict.result.protocol, strict.result.notes) == ("strict", ())


def test_all_systems_of_a_comparison_decode_alike(evaluate: Evaluate, tiny_checkpoint: Path) -> None:
    options = ("--documents", 5, "--learning-rate", 1e-3, "--methods", "zero-shot,uniform,retriever,mac")
    evaluated = evaluate("main_table", *options, "--protocol", "published", "--lora-rank", 2)
    model = MACModel.from_pretrained(str(tiny_checkpoint), device="cpu")
    asked = [sample.question for sample in evaluated.samples]
    predictions = [sample.rows["Zero-shot"].prediction for sample in evaluated.samples]
    assert predictions == searched(model.base_lm, [model.base_lm.prompts.prompt(question) for question in asked])
    assert evaluated.rows["Uniform"].settings == {"method": "Uniform", "learning_rate": 1e-3, "lora_rank": 2}
    assert evaluated.result.protocol == "published"


@pytest.mark.parametrize("name", ["distilbert/distilgpt2", "openai-community/gpt2-xl", "meta-llama/Llama-2-7b-hf"])
def test_a_tuned_lm_is_known_by_its_architecture(name: str) -> None:
    assert published_lm(architecture(name)) == name
    other = architecture(name)
    other.vocab_size += 1
    assert published_lm(other) is None


def test_a_report_puts_the_papers_figures_beside_ours(tmp_path: Path) -> None:
    model: Any = result("main_table").model
    model = model.model_copy(update={"name": "runs/distilgpt2/train/best", "lm": "distilbert/distilgpt2"})
    rows = [Row(name="MAC", settings={"method": "MAC"}, em=0.05, f1=0.1), Row(name="Zero-shot", em=0.01, f1=0.02)]
    data = Data(name="streamingqa", split="test", source="data", documents=1665, questions=1665)
    made = result("main_table", rows, model=model, data=data, protocol="published")
    experiment = next(entry for entry in CATALOGUE if entry.name == "main_table")
    shown = table(made, experiment)
    assert shown.headers[:5] == ("", "EM %", "paper EM %", "F1 %", "paper F1 %")
    assert [cell.text for cell in shown.rows[0]][:5] == ["MAC", "5.0", "5.6", "10.0", "10.2"]
    assert shown.rows[1][2].text == "–"
    assert "published protocol" in about(ResultFile(tmp_path / "r.json", made))
    assert json.loads(made.model_dump_json())["protocol"] == "published"


def test_the_published_protocol_has_one_memory_weight(command: Command, tiny_checkpoint: Path) -> None:
    options = ("--model", tiny_checkpoint, "--documents", 3, "--memory-weight", "1,0.5", "--protocol", "published")
    code, _, errors = command("eval.archivalqa", *options)
    assert code == 1
    assert "--memory-weight 1,0.5 is not of the published protocol" in errors


def test_searched_answers_under_memory_are_those_of_a_plain_search(tiny_model: MACModel) -> None:
    """A prompt is read once for all beams, after its own prefix."""
    asked = ["Who opened the harbour?", "Which town?"]
    phi = tiny_model.aggregate(asked, tiny_model.amortize(["The harbour was opened.", "A town."]))
    one_by_one = [with_memory(tiny_model, [question], phi[i : i + 1])[0] for i, question in enumerate(asked)]
    assert with_memory(tiny_model, asked, phi) == one_by_one
    greedy = tiny_model.generate(asked, modulation=phi)
    prompts = [tiny_model.base_lm.prompts.prompt(question) for question in asked]
    modulation = tiny_model.modulation(phi)
    limit = tiny_model.config.max_new_tokens
    assert searched(tiny_model.base_lm, prompts, modulation, groups=1, size=1, penalty=0.0, most=limit) == greedy
