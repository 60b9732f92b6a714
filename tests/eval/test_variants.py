"""Experiments that train: variants of MAC with their grafts and recipes, the memory of a training step, perplexity."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eval.dropout_memory import TABLE, first_batch, memory_rows, step_memory
from eval.harness.variants import Training, evaluate, grafted, stories
from eval.perplexity import BEGINNING, TRAINING_DOCUMENTS, continuations, cut, language_recipe, perplexity
from eval.variants import DESIGNS, KINDS, PRECISIONS, tiny_designs
from mac_rag.config import EncoderConfig, ModulationConfig
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.lm.loading import INT8_LM, load_backbone
from mac_rag.model import MACModel
from mac_rag.model.checkpoint import read_config
from mac_rag.model.presets import merged
from tests.eval.helpers import Evaluate

SMALL = ("--steps", 2, "--documents", 5)
pytestmark = pytest.mark.usefixtures("few_stories")


@pytest.mark.slow
def test_each_modulation_is_trained_once(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _, samples, _ = evaluate("variants", "peft", *SMALL)
    assert [row.settings["method"] for row in result.rows] == list(KINDS)
    assert all(row.em is not None and row.measures["answer_loss"] > 0 for row in result.rows)
    assert len(samples) == 5
    losses = [row.measures["answer_loss"] for row in result.rows]
    assert len(set(losses)) == 3

    def again(*_: object) -> None:
        raise AssertionError("a finished training was made again")

    monkeypatch.setattr("pipelines.trainer.Trainer.run", again)
    assert [row.measures["answer_loss"] for row in evaluate("variants", "peft", *SMALL).result.rows] == losses


def test_quantization_lists_4_bit_as_not_run_without_bitsandbytes(
    evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    result, _, _, shown = evaluate("variants", "quantization", *SMALL)
    assert [row.settings["method"] for row in result.rows] == ["32bit", "16bit"]
    assert "needs bitsandbytes" in result.not_run["4bit"]
    assert "Not run: 4bit" in shown


@pytest.mark.slow
def test_each_precision_is_trained(evaluate: Evaluate) -> None:
    result = evaluate("variants", "quantization", *SMALL).result
    assert [row.settings["method"] for row in result.rows] == ["32bit", "16bit", "4bit"]
    assert not result.not_run
    assert len({row.measures["answer_loss"] for row in result.rows}) == 3


@pytest.mark.slow
def test_each_design_of_amortization_is_trained(evaluate: Evaluate, tmp_path: Path) -> None:
    result = evaluate("variants", "amortization", *SMALL).result
    assert [row.settings["method"] for row in result.rows] == [*DESIGNS, "decoder-only, pretrained"]
    trained = [json.loads(path.read_text()) for path in (tmp_path / "variants").glob("*/best/config.json")]
    assert sorted(config["amortization"]["design"] for config in trained) == [
        "decoder-only", "decoder-only", "encoder-decoder", "encoder-only",
    ]  # fmt: skip


def test_designs_start_from_the_embeddings_of_a_model_stored_as_int8(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = MACModel.from_pretrained(tiny_checkpoint)
    model.train_base_lm(lora_rank=None)
    model.save_pretrained(tmp_path / "int8", dtype=torch.int8)
    assert (tmp_path / "int8" / "base_lm" / INT8_LM).is_file()
    designs = tiny_designs(str(tmp_path / "int8"), tmp_path, 0)
    expected = MACModel.from_pretrained(tmp_path / "int8", device="cpu").base_lm.model.get_input_embeddings().weight
    for design in DESIGNS:
        backbone = load_backbone(EncoderConfig.model_validate(designs[design]), torch.device("cpu"))
        assert torch.equal(backbone.get_input_embeddings().weight, expected)


@pytest.mark.parametrize(
    ("preset", "fresh", "changes"),
    [
        *(("gpt2-xl", "modulation", {"model": {"modulation": {"kind": kind}}}) for kind in KINDS.values()),
        *(("gpt2-xl", "amortization", {"model": {"amortization": design}}) for design in DESIGNS.values()),
        *(("llama2-7b", "modulation", changes) for changes in PRECISIONS["paper"].values()),
        *(
            ("llama2-7b", "amortization", {"context_set": None, "trainer": {"batch_size": k}})
            for k, _, _ in TABLE["paper"].values()
        ),
        *((preset, None, {}) for preset in ("distilgpt2", "gpt2-large")),
    ],
)
def test_the_papers_recipes_load(preset: str, fresh: Any, changes: dict[str, Any]) -> None:
    training = Training(preset, "data/streamingqa", Path("variants"), 3, None, "paper")
    recipe = training.recipe(fresh, changes)
    assert (recipe.data.name, recipe.data.path, recipe.trainer.seed) == ("streamingqa", "data/streamingqa", 3)
    assert recipe.model.base_lm.name == f"runs/{preset}/tune_qa/best"
    values = recipe.model_dump(mode="json")
    assert merged(values, changes) == values


def test_each_story_is_one_sentence_with_one_question() -> None:
    dataset = stories("test", 30, 0)
    assert [question.document_id for question in dataset.questions] == [document.id for document in dataset.documents]
    for document, question in zip(dataset.documents, dataset.questions):
        assert question.answers[0] in document.text
        assert document.text.endswith(".")


@pytest.mark.parametrize("kind", ["lora", "film"])
def test_a_graft_keeps_all_but_the_fresh_part(tiny_checkpoint: Path, tmp_path: Path, kind: Any) -> None:
    config = read_config(tiny_checkpoint)
    base_lm = config.base_lm.model_copy(update={"name": str(tiny_checkpoint / "base_lm")})
    config = config.model_copy(update={"base_lm": base_lm, "modulation": ModulationConfig(kind=kind)})
    place = grafted(config, tiny_checkpoint, "modulation", tmp_path, 0)
    old, new = (MACModel.from_pretrained(folder, device="cpu") for folder in (tiny_checkpoint, place))
    assert new.config.modulation.kind == kind
    kept = {name: weight for name, weight in old.mac_state().items() if not name.startswith("modulation.")}
    for name, weight in kept.items():
        assert torch.equal(new.mac_state()[name], weight), name
    again = (place / "model.safetensors").stat().st_mtime_ns
    assert grafted(config, tiny_checkpoint, "modulation", tmp_path, 0) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == again


def test_the_answer_loss_equals_a_plain_loop(tiny_model: MACModel) -> None:
    dataset = stories("test", 7, 1)
    row, verdicts = evaluate("row", tiny_model, dataset, 3)
    engine = MACEngine(tiny_model)
    engine.adapt(dataset.documents)
    total, tokens = 0.0, 0
    prompts = tiny_model.base_lm.prompts
    for question in dataset.questions:
        phi = tiny_model.aggregate([question.question], engine.bank.phi)
        answer = prompts.answer(question.answers[0])
        with torch.no_grad():
            modulation = tiny_model.modulation(phi)
            total += float(tiny_model.base_lm.answer_loss([prompts.prompt(question.question)], [answer], modulation))
        tokens += len(answer)
    assert row.measures["answer_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert row.em == sum(verdict.em for verdict in verdicts) / 7


TRAINING = generate("train", 8, questions_per_document=2)


def test_memory_falls_with_p_and_grows_with_k(tiny_model: MACModel) -> None:
    rows = {row.name: row.measures for row in memory_rows(tiny_model, TRAINING, [4, 8], 0)}
    peaks = {name: row["peak_mb"] for name, row in rows.items()}
    for count in (4, 8):
        by_p = [peaks[f"K = {count}, p = {share}"] for share in (0.0, 0.5, 0.75)]
        assert by_p == sorted(by_p, reverse=True)
        assert by_p[0] > 1.2 * by_p[-1]
    assert peaks["K = 8, p = 0.0"] > peaks["K = 4, p = 0.0"]
    # Of four documents, one under gradients is both p = 0.75 and the least there is.
    assert peaks["K = 4, p = min"] == peaks["K = 4, p = 0.75"]


def test_a_measured_step_leaves_the_model_as_it_was(tiny_model: MACModel) -> None:
    weights = {name: parameter.clone() for name, parameter in tiny_model.named_parameters()}
    assert step_memory(tiny_model, first_batch(tiny_model, TRAINING, 2), 0.0, 0) > 0
    assert not tiny_model.training
    assert all(parameter.grad is None for parameter in tiny_model.parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in tiny_model.named_parameters())


def test_a_batch_has_a_question_on_each_document(tiny_model: MACModel) -> None:
    batch = first_batch(tiny_model, TRAINING, 5)
    assert batch.documents == [document.text for document in TRAINING.documents[:5]]
    assert batch.questions == [question.question for question in TRAINING.questions[0:10:2]]
    with pytest.raises(ConfigError, match="K is 9, but the stream has only 8 documents"):
        first_batch(tiny_model, TRAINING, 9)


@pytest.mark.slow
def test_the_table_of_answers_can_be_left_out(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.dropout_memory.TABLE", {"tiny": {"No backprop.": (2, 1, 0.0), "MAC": (4, 2, 0.75)}})
    small = ("--steps", 1, "--documents", 4, "--k", 2)
    rows = evaluate("dropout_memory", *small).result.rows
    assert [row.name for row in rows[:2]] == ["No backprop.", "MAC"]
    assert [(row.settings["K"], row.settings["p"]) for row in rows[:2]] == [(2, 0.0), (4, 0.75)]
    assert all(row.f1 is not None for row in rows[:2])
    assert len(rows) == 2 + 5
    result = evaluate("dropout_memory", *small, "--no-trainings").result
    assert (len(result.rows), result.samples) == (5, None)
    assert "the table of answers by p" in result.not_run


NEWS = generate("test", 6)


def test_a_document_is_cut_after_its_first_tenth(tiny_model: MACModel) -> None:
    prompts = tiny_model.base_lm.prompts
    for text in (NEWS.documents[0].text, "Two words", "Rain"):
        beginning, rest = cut(prompts, text)
        assert beginning
        assert rest
        assert beginning + rest == prompts.tokenizer(text, add_special_tokens=False).input_ids
    beginning, rest = cut(prompts, NEWS.documents[0].text)
    assert len(beginning) == round(BEGINNING * (len(beginning) + len(rest)))


@pytest.mark.parametrize("memory", [True, False])
def test_perplexity_equals_a_plain_loop(tiny_model: MACModel, memory: bool) -> None:
    lm, prompts = tiny_model.base_lm, tiny_model.base_lm.prompts
    bank = tiny_model.amortize([document.text for document in NEWS.documents[:3]]) if memory else None
    total, tokens = 0.0, 0
    for document in NEWS.documents:
        beginning, rest = cut(prompts, document.text)
        start = [*prompts.start, *beginning]
        modulation = None
        with torch.no_grad():
            if bank is not None:
                phi = tiny_model.aggregate([prompts.tokenizer.decode(beginning)], bank)
                modulation = tiny_model.modulation(phi)
            total += float(lm.answer_loss([start], [rest], modulation))
        tokens += len(rest)
    assert perplexity(tiny_model, NEWS.documents, bank, 4) == pytest.approx(math.exp(total / tokens), rel=1e-4)


def test_a_long_article_ends_at_a_word_within_the_limit(tiny_model: MACModel) -> None:
    tokenizer = tiny_model.base_lm.tokenizer
    article = Document("long", " ".join(f"storm{i}" for i in range(900)))
    [made] = continuations(QADataset("set", "train", (article,), ()), tokenizer, 50).documents
    assert article.text.startswith(f"{made.text} ")
    assert 30 < len(tokenizer(made.text, add_special_tokens=False).input_ids) <= 50


@given(st.lists(st.text("ab ", min_size=1).filter(str.strip), min_size=1, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the model only reads
def test_continuations_keep_every_word(tiny_model: MACModel, texts: list[str]) -> None:
    documents = tuple(Document(str(i), text) for i, text in enumerate(texts))
    made = continuations(QADataset("set", "train", documents, ()), tiny_model.base_lm.tokenizer, 10_000)
    assert [document.text for document in made.documents] == [text for text in texts if len(text.split()) > 1]
    for document, question in zip(made.documents, made.questions, strict=True):
        assert f"{question.question} {question.answers[0]}".split() == document.text.split()


def test_each_system_has_a_perplexity(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINING_DOCUMENTS, "tiny", 40)
    rows = evaluate("perplexity", "--steps", 1, "--documents", 4, "--baselines", "uniform").rows
    assert list(rows) == ["LM alone", "MAC, trained on questions", "MAC", "Uniform"]
    for row in rows.values():
        assert min(row.measures[f"perplexity_{which}"] for which in ("adapted", "unseen")) > 1


def test_the_papers_recipe_loads(tiny_model: MACModel, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_archivalqa(generate(split, 4), tmp_path / "archivalqa" / f"{split}.csv")
    training = Training("gpt2-large", str(tmp_path / "archivalqa"), tmp_path / "variants", 0, None, "paper")
    recipe = language_recipe(training, 1_000_000, tiny_model.base_lm.tokenizer, 384)
    assert recipe.model.prompt.question == "{question}"
    assert len(recipe.data.training_set().documents) == 4
