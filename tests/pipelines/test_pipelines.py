"""The pipelines end to end on tiny models: what they export loads, and a run that stopped goes on as if it had not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, QuantizationError
from mac_rag.model import MACModel
from pipelines.corpora.qa_data import DataConfig
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.recipe import load_recipe
from pipelines.tasks.train import TrainTask, excerpt
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneTask
from pipelines.trainer import Task, Trainer
from tests.helpers import Folder
from tests.pipelines.helpers import DATA, TRAINER, command, metrics, tune_recipe


def train_recipe(model_folder: Folder, **values: Any) -> TrainConfig:
    """A recipe with every part switched on: all losses, dropout, negatives, retrieved documents."""
    recipe = {
        "model": {
            "base_lm": {"name": str(model_folder("llama"))},
            "amortization": {"design": "encoder-decoder", "name": str(model_folder("t5"))},
            "input_encoder": {"design": "decoder-only", "name": None},
            "tokens": 3,
            "max_new_tokens": 4,
            "aggregation": {"blocks": 2, "heads": 2, "head_width": 8, "prior_width": 8},
        },
        "data": DATA,
        "questions_per_document": 2,
        "backprop_dropout": 0.5,
        "losses": {"answer": 1, "direct": 1, "reconstruction": 1, "contrastive": 1},
        "negatives": 7,
        "distractors": 1,
        "context": {"retriever": "bm25", "k": [1, 2], "rate": 0.5, "gold_rate": 0.5},
        "trainer": TRAINER,
    }
    return TrainConfig.parse({**recipe, **values}, "test")


def stopping_at(task: Task, step: int) -> Task:
    """The task, interrupted when it is asked for the batch of a step."""
    batch = task.batch

    def interrupted(asked: int, micro: int, size: int) -> Any:
        if asked == step:
            raise KeyboardInterrupt
        return batch(asked, micro, size)

    task.batch = interrupted  # type: ignore[method-assign]
    return task


def resumed_and_whole(recipe: TrainConfig, output: Path) -> list[MACModel]:
    """The models of a run that was interrupted in step 3 and of one that was not; both had the same losses."""
    Trainer(TrainTask(recipe), recipe.trainer, output / "whole").run()
    with pytest.raises(KeyboardInterrupt):
        Trainer(stopping_at(TrainTask(recipe), 3), recipe.trainer, output / "stopped").run()
    Trainer(TrainTask(recipe), recipe.trainer, output / "stopped").run()
    assert metrics(output / "stopped") == metrics(output / "whole")
    return [MACModel.from_pretrained(output / name / "last", device="cpu") for name in ("stopped", "whole")]


def test_a_stopped_training_goes_on_to_the_same_losses(model_folder: Folder, tmp_path: Path) -> None:
    stopped, whole = resumed_and_whole(train_recipe(model_folder), tmp_path)
    assert stopped.fingerprint == whole.fingerprint


def test_a_curriculum_grows_the_documents_around_the_answers(model_folder: Folder) -> None:
    recipe = train_recipe(model_folder, curriculum=10)
    task = TrainTask(recipe)
    for step in (0, 1, 2, 3, 9, 10):
        batch, weights = task.batch(step, 0, 3)
        assert weights == (recipe.losses if step == 10 else LossWeights(answer=0, direct=1))
        sentences = {0: 1, 1: 1, 2: 2, 3: 2}.get(step, 5)
        assert [len(text.split(". ")) for text in batch.documents] == [sentences] * 3
        assert len(batch.questions) == 3 * min(2, sentences)
        for answer, gold in zip(batch.answers, batch.gold, strict=True):
            assert answer in batch.documents[gold]
        terms = {"direct"} if step < 10 else {"answer", "direct", "reconstruction", "contrastive"}
        assert set(task((batch, weights))) == {"loss", *terms}


def test_documents_of_one_title_stay_together(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of titles with 5, 4, 4, ... documents next to each other, a batch of 6 has runs of at most 3."""
    data = DataConfig(documents=37).training_set()
    titles = ["first", *(f"title {i // 4}" for i in range(36))]
    titles[1] = titles[0]
    documents = [dataclasses.replace(d, metadata={"title": t}) for d, t in zip(data.documents, titles, strict=True)]
    titled = dataclasses.replace(data, documents=tuple(documents))
    monkeypatch.setattr(DataConfig, "training_set", lambda self, **_: titled)
    task = TrainTask(train_recipe(model_folder, group_by_title=3))
    place = {document.text: i for i, document in enumerate(documents)}
    seen: set[int] = set()
    for step in range(60):
        batch, _ = task.batch(step, 0, 6)
        places = [place[text] for text in batch.documents]
        seen.update(places)
        runs = [[places[0]]]
        for one in places[1:]:
            if one == runs[-1][-1] + 1 and titles[one] == titles[one - 1] and len(runs[-1]) < 3:
                runs[-1].append(one)
            else:
                runs.append([one])
        assert len(runs) == 2
        assert all(len({titles[i] for i in run}) == 1 for run in runs)
    assert seen == set(range(37))


def test_an_excerpt_without_the_answer_is_the_whole_text() -> None:
    text = "One thing. Another thing! A third?"
    assert excerpt(text, ["Another"], 1) == "Another thing!"
    assert excerpt(text, ["Another"], 2) == "One thing. Another thing!"
    assert excerpt(text, ["nowhere"], 1) == text


def test_there_are_no_more_distractors_than_negatives(model_folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"distractors \(4\) are chosen among negatives \(3\)"):
        train_recipe(model_folder, negatives=3, distractors=4)


def test_training_changes_the_networks_and_leaves_the_lm_frozen(model_folder: Folder, tmp_path: Path) -> None:
    recipe = train_recipe(model_folder)
    task = TrainTask(recipe)
    before = {name: p.clone() for name, p in task.model.named_parameters()}
    figures = Trainer(task, recipe.trainer, tmp_path).run()
    after = dict(task.model.named_parameters())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed >= {name for name in task.model.mac_state() if "prior_scale" not in name}
    assert not any(name.startswith("base_lm.") for name in changed)
    losses = {"loss", "answer_loss", "direct_loss", "reconstruction_loss", "contrastive_loss"}
    assert figures.keys() == {"em", "f1", "em_retrieved", "f1_retrieved", *losses}
    held_out = generate("val", 6)
    assert [question.document_id for question in held_out.questions] == [d.id for d in held_out.documents]
    for name in losses:
        halves = []
        for half in (slice(0, 3), slice(3, 6)):
            texts = [document.text for document in held_out.documents[half]]
            asked = [question.question for question in held_out.questions[half]]
            answers = [question.answers[0] for question in held_out.questions[half]]
            terms, _ = mac_loss(task.model.eval(), Batch(texts, asked, answers, [0, 1, 2]), recipe.losses)
            halves.append(float(terms[name.removesuffix("_loss")].detach()))
        assert figures[name] == pytest.approx(sum(halves) / 2, rel=1e-4)
    assert int(task.negatives_seen) == 4 * 3


def test_training_goes_on_from_a_checkpoint(model_folder: Folder, tmp_path: Path) -> None:
    """With its weights, the base LM's among them, and to a checkpoint that stands on its own."""
    first = train_recipe(model_folder, tune_base_lm="full")
    Trainer(TrainTask(first), first.trainer, tmp_path / "first").run()
    start = str(tmp_path / "first" / "last")
    more = train_recipe(model_folder, model=None, start_from=start, tune_base_lm="full")
    task = TrainTask(more)
    saved = MACModel.from_pretrained(start, device="cpu")
    for name, weights in saved.state_dict().items():
        assert torch.equal(task.model.state_dict()[name], weights), name
    Trainer(task, more.trainer, tmp_path / "more").run()
    (tmp_path / "first").rename(tmp_path / "gone")
    again = MACModel.from_pretrained(tmp_path / "more" / "last", device="cpu")
    assert again.fingerprint == task.model.fingerprint != saved.fingerprint


def test_training_starts_in_one_way(model_folder: Folder) -> None:
    for values in ({"start_from": "mac-tiny"}, {"model": None}):
        with pytest.raises(ConfigError, match="one of model, preset and start_from"):
            train_recipe(model_folder, **values)


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_tuned_lm_is_an_ordinary_model_folder(model_folder: Folder, tmp_path: Path, tune: str) -> None:
    context = {"retriever": "bm25", "k": [2], "rate": 0.9}
    recipe = tune_recipe(model_folder("gpt2"), context=context, tune=tune, questions_per_context=3)
    figures = Trainer(TuneTask(recipe), recipe.trainer, tmp_path).run()
    assert figures.keys() == {f"{name}{place}" for name in ("em", "f1") for place in ("_closed", "_retrieved_2", "")}
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert not any("lora" in name for name, _ in lm.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "best")("text").input_ids


def test_questions_tuned_on_stand_behind_the_documents_that_answer_them(model_folder: Folder) -> None:
    task = TuneTask(tune_recipe(model_folder("gpt2"), questions_per_context=2, sequence_length=2000))
    for ids, labels, *_ in task.batch(0, 0, 3):
        text = task.encoder.tokenizer.decode(ids)
        answers = task.encoder.tokenizer.decode([token for token in labels if token != -100])
        assert text.count("Question:") == text.count("Answer:") == 2
        for answer in answers.split("</s>")[:-1]:
            assert answer.strip() in text.split("Question:")[0]


def test_tuning_reads_conversations_and_learns_answers_with_their_ends(model_folder: Folder) -> None:
    task = TuneTask(
        tune_recipe(
            model_folder("instruct"),
            prompt={"chat": True, "system": "Answer in a few words."},
            context={"retriever": "bm25", "k": [1]},
            questions_per_context=2,
            sequence_length=1024,
        )
    )
    for sequence in task.batch(0, 0, 2):
        assert sequence.labels[-1] != -100
        learned = task.encoder.tokenizer.decode([label for label in sequence.labels if label != -100])
        text = task.encoder.tokenizer.decode(sequence.ids)
        assert text.startswith("<|im_start|>system\nAnswer in a few words.<|im_end|>\n<|im_start|>user\n")
        assert learned.count("<|im_end|>") == text.count("<|im_start|>assistant\n") == 2
        assert learned.endswith("<|im_end|>")
        assert "<|im_start|>" not in learned
    assert set(task.validate()) >= {"em", "f1"}


@pytest.mark.parametrize("gold_rate", [0.0, 1.0])
def test_an_lm_learns_to_abstain_where_nothing_in_front_answers(model_folder: Folder, gold_rate: float) -> None:
    context = {"retriever": "bm25", "k": [2], "rate": 0.5, "gold_rate": gold_rate}
    prompt = {"abstention": "I don't know"}
    task = TuneTask(tune_recipe(model_folder("gpt2"), prompt=prompt, context=context, sequence_length=2000))
    abstained = set()
    for step in range(6):
        for ids, labels, *_ in task.batch(step, 0, 3):
            documents = task.encoder.tokenizer.decode(ids).split("Question:")[0]
            answer = task.encoder.tokenizer.decode([token for token in labels if token != -100][:-1]).strip()
            abstained.add(answer == "I don't know")
            assert (answer == "I don't know") == (not documents.strip("<s> ") or not gold_rate)
            assert answer == "I don't know" or answer in documents
    assert abstained == ({True, False} if gold_rate else {True})


def test_training_through_int8_weights_needs_a_gpu(model_folder: Folder) -> None:
    recipe = train_recipe(model_folder)
    base_lm = recipe.model.base_lm.model_copy(update={"quantization": "int8"})
    encoder = recipe.model.amortization
    model = recipe.model.model_copy(update={"base_lm": base_lm, "input_encoder": encoder})
    with pytest.raises(QuantizationError, match="CUDA GPU"):
        TrainTask(recipe.model_copy(update={"model": model}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: gpt9\ntrainer: {}", "gpt9"),
        ("model: [", "not valid YAML"),
        ("losses: {anser: 1}", "losses.anser"),
        ("context: {retriever: google}", "unknown retriever 'google'"),
        ("context: {retriever: 'chroma:folder'}", "minilm finds the same"),
        ("context: {retriever: 'no_module:attr'}", "cannot import retriever 'no_module:attr'"),
    ],
)
def test_bad_recipes_name_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"task: train\n{text}")
    with pytest.raises(ConfigError, match=message):
        load_recipe(TrainConfig, str(path), None)


def test_set_wins_over_the_recipe(model_folder: Folder, tmp_path: Path) -> None:
    """A run that it made goes on with the same values alone."""
    recipe = train_recipe(model_folder, context={}).model_dump(mode="json")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"task": "train", **recipe}))
    output = tmp_path / "out"
    common = ("--config", str(tmp_path / "train.yaml"), "--output", str(output))
    values = ("--set", "context.k=[1,2]", "--set", "tune_base_lm=lora", "--set")
    wrong = command("pipelines.train", *common, *values, "context.retriever=hybrid-of-nothing")
    assert "hybrid-of-nothing" in str(wrong.exception)
    assert not output.exists()
    options = (*common, *values, "context.retriever=mac_rag.retrieval:BM25Retriever")
    finished = command("pipelines.train", *options)
    assert finished.exit_code == 0, finished.exception
    kept = yaml.safe_load((output / "config.yaml").read_text())
    assert kept["context"]["retriever"] == "mac_rag.retrieval:BM25Retriever"
    assert (kept["context"]["k"], kept["tune_base_lm"]) == ([1, 2], "lora")
    assert {"em_retrieved", "f1_retrieved"} <= metrics(output)[-1].keys()
    trained = MACModel.from_pretrained(output / "last", device="cpu").base_lm.model.state_dict()
    original = AutoModelForCausalLM.from_pretrained(model_folder("llama")).state_dict()
    assert trained.keys() == original.keys()  # its LoRA updates are part of the LM's weights
    assert any(not torch.equal(trained[name], original[name]) for name in original)
    assert command("pipelines.train", *options).exit_code == 0
    assert "another configuration" in str(command("pipelines.train", *common).exception)


def test_an_lm_is_tuned_with_a_retriever(model_folder: Folder, tmp_path: Path) -> None:
    recipe = {"task": "tune_qa", "base_lm": {"name": str(model_folder("gpt2"))}, "data": DATA, "trainer": TRAINER}
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(recipe))
    common = ("--config", str(tmp_path / "tune.yaml"), "--set", "context.retriever=bm25", "--output")
    assert command("pipelines.train", *common, str(tmp_path / "out"), "--set", "context.k=[1,3]").exit_code == 0
    assert {"em_closed", "em_retrieved_1", "em_retrieved_3"} <= metrics(tmp_path / "out")[-1].keys()
    for wrong, message in (("x", "context.k.0"), ("0", "at least 1"), ("1]", "not valid YAML"), ("50", "k is 50")):
        found = command("pipelines.train", *common, str(tmp_path / wrong), "--set", f"context.k=[{wrong}]")
        assert message in str(found.exception)
