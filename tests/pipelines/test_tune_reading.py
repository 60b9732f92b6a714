"""Tuning an LM to read: what a pack holds, exact resume through the codec, what is saved, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from mac_rag.data.metrics import normalize
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.engine import MACEngine
from mac_rag.errors import DataError, MACError, ModelLoadError
from mac_rag.lm.block_prompt import BlockPrompt
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever
from pipelines.corpora.continuations import read_continuations
from pipelines.corpora.multi_document import generate_multi_document
from pipelines.corpora.packs import PackConfig, PackMaker, joined_documents
from pipelines.tasks import tune_reading
from pipelines.tasks.tune_reading import TuneReadingConfig, TuneReadingTask
from pipelines.trainer import Trainer
from tests.helpers import Folder
from tests.pipelines.helpers import command, metrics
from tests.pipelines.test_pipelines import stopping_at

ABSTENTION = "I don't know"


def recipe(model_folder: Folder, **values: Any) -> TuneReadingConfig:
    base = {
        "base_lm": {"name": str(model_folder("instruct"))},
        "turn": "Context: {document}\n\nQuestion: {question}",
        "packs": {"documents": [1, 2, 3], "questions": 4, "absent": 0.2},
        "data": {"name": "newswire", "documents": 12, "validation_documents": 6},
        "trainer": {
            "steps": 4, "batch_size": 1, "learning_rate": 0.01, "validate_every": 2, "save_every": 1,
            "best": "f1_right",
        },
    }  # fmt: skip
    return TuneReadingConfig.parse({**base, **values}, "recipe")


COMPRESSION = [16, 32]


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each validation."""
    monkeypatch.setattr(tune_reading, "_VALIDATED", 4)


@pytest.fixture(scope="module")
def data() -> QADataset:
    return generate("train", 40, seed=3, questions_per_document=4)


class TestPacks:
    def test_the_right_document_is_always_there_unless_it_is_to_be_absent(self, data: QADataset) -> None:
        maker = PackMaker(PackConfig(documents=(1, 3), questions=6), data, ABSTENTION)
        rng = random.Random(0)
        for question in data.questions:
            pack = maker.make(question, rng)
            present = {document.id for document in pack.documents}
            assert question in pack.questions
            assert 1 <= len(pack.documents) <= 3
            assert all(q.document_id in present for q in pack.questions)
            assert pack.answers == [q.answers[0] for q in pack.questions]
            assert len(set(pack.questions)) == len(pack.questions) <= 6

    def test_the_wanted_share_of_questions_is_asked_in_vain(self, data: QADataset) -> None:
        maker = PackMaker(PackConfig(absent=0.3), data, ABSTENTION)
        rng, targets = random.Random(0), []
        for question in data.questions:
            pack = maker.make(question, rng)
            text = " ".join(normalize(document.text) for document in pack.documents)
            for asked, answer in zip(pack.questions, pack.answers, strict=True):
                absent = all(document.id != asked.document_id for document in pack.documents)
                assert (answer == ABSTENTION) == absent
                assert not absent or not any(f" {normalize(a)} " in f" {text} " for a in asked.answers)
                targets.append(absent)
        assert 0.2 < sum(targets) / len(targets) < 0.35

    def test_a_question_about_several_documents_gets_all_of_them_or_none_answers(self) -> None:
        stream = generate_multi_document("train", 80, questions_per_kind=20)
        for absent in (0.0, 0.4):
            maker = PackMaker(PackConfig(documents=(1, 5), absent=absent), stream, ABSTENTION)
            targets = []
            for number, question in enumerate(stream.questions):
                pack = maker.make(question, random.Random(number))
                present = {document.id for document in pack.documents}
                assert len(present) == len(pack.documents) <= 5
                for asked, answer in zip(pack.questions, pack.answers, strict=True):
                    complete = present.issuperset((asked.gold, *asked.further_ids))
                    assert answer == (asked.answers[0] if complete else ABSTENTION)
                    targets.append(complete)
            assert all(targets) == (absent == 0)
            assert sum(targets) / len(targets) > 0.4

    def test_scores_are_those_of_the_retriever(self, data: QADataset) -> None:
        retriever = BM25Retriever()
        retriever.add(data.documents)
        pack = PackMaker(PackConfig(documents=(3,)), data, ABSTENTION).make(data.questions[5], random.Random(1))
        for question, scores in zip(pack.questions, pack.scores, strict=True):
            hits = {hit.document_id: hit.score for hit in retriever.retrieve([question.question], 40)[0]}
            assert scores == [hits.get(document.id, 0.0) for document in pack.documents]

    def test_a_question_without_an_answer_is_refused(self, data: QADataset) -> None:
        blank = QADataset("own", "train", data.documents, (Question("q9", "Who?", (), data.documents[0].id),))
        with pytest.raises(DataError, match=r"question 'q9' of own, train has no answer.*self_study"):
            PackMaker(PackConfig(), blank, ABSTENTION)


def test_only_neighbours_of_one_title_are_joined(model_folder: Folder) -> None:
    prompt = BlockPrompt(AutoTokenizer.from_pretrained(model_folder("instruct")), "{document}\n{question}")
    documents = tuple(Document(f"d{i}", f"Text {i}. " * 5, {"title": f"t{i // 10}"}) for i in range(100))
    questions = tuple(Question(f"q{i}", "What?", ("x",), f"d{i}") for i in range(100))
    whole = QADataset("own", "train", documents, questions)
    joined = joined_documents(whole, prompt, seed=0, share=0.5, most=90)
    assert 40 < len(joined.documents) < 70
    texts = {document.id: document.text for document in joined.documents}
    for question in joined.questions:
        assert f"Text {question.id[1:]}. " in texts[question.gold]
    for document in joined.documents:
        numbers = {int(word[:-1]) for word in document.text.split() if word != "Text"}
        assert len({number // 10 for number in numbers}) == 1
        assert len(prompt.texts.ids(document.text)) <= 90
    assert max(Counter(question.gold for question in joined.questions).values()) > 1
    assert joined_documents(whole, prompt, seed=0, share=0.0) == whole


def test_a_stopped_run_goes_on_exactly_through_the_codec(model_folder: Folder, tmp_path: Path) -> None:
    config = recipe(model_folder, compression=COMPRESSION)
    Trainer(TuneReadingTask(config), config.trainer, tmp_path / "whole").run()
    for step in (1, 3):
        stopped = tmp_path / f"stopped in {step}"
        with pytest.raises(KeyboardInterrupt):
            Trainer(stopping_at(TuneReadingTask(config), step), config.trainer, stopped).run()
        Trainer(TuneReadingTask(config), config.trainer, stopped).run()
        assert metrics(stopped) == metrics(tmp_path / "whole")
        for name in ("adapter_model.safetensors", "codec.safetensors", "reading.json"):
            assert (stopped / "last" / name).read_bytes() == (tmp_path / "whole/last" / name).read_bytes()


def test_the_lm_teaches_itself_with_the_right_document_as_text(model_folder: Folder) -> None:
    torch.manual_seed(0)
    task = TuneReadingTask(
        recipe(model_folder, distillation=1.0, packs={"documents": [3], "questions": 4, "absent": 0})
    )
    for name, parameter in task.lm.named_parameters():
        if "lora_B" in name:  # the student is no longer its own teacher
            torch.nn.init.normal_(parameter, std=0.1)
    [pack] = task.batch(0, 0, 1)
    untouched = AutoModelForCausalLM.from_pretrained(model_folder("instruct"), dtype=task.lm.dtype)
    expected = []
    with torch.no_grad():
        teacher = task._teacher_logits(pack)
        for (question, answer), right in zip(pack.questions, pack.right, strict=True):
            document = pack.documents[int(right.int().argmax())]
            text = [*task.prompt.opening, *document, *question, *answer]
            longest = max(map(len, pack.documents))
            places = [*range(len(task.prompt.opening) + len(document))]
            places += range(len(task.prompt.opening) + longest, len(text) + longest - len(document))
            logits = untouched(torch.tensor([text]), position_ids=torch.tensor([places])).logits[0]
            expected.append(logits[-len(answer) - 1 : -1].float())
    torch.testing.assert_close(teacher.softmax(-1), torch.cat(expected).softmax(-1), rtol=0, atol=2e-3)
    loss = task([pack])["loss"]
    student = task._blocks.answer_logits(task._blocks.read(pack.documents), pack.questions, task.bias_scale * pack.bias)
    p, q = teacher.softmax(-1), student.softmax(-1)
    torch.testing.assert_close(loss, (p * (p.log() - q.log())).sum(-1).mean(), rtol=1e-4, atol=1e-5)
    loss.backward()
    assert task.bias_scale.grad is not None


def test_a_later_stage_starts_from_what_an_earlier_one_saved(model_folder: Folder, tmp_path: Path) -> None:
    config = recipe(model_folder)
    task = TuneReadingTask(config)
    Trainer(task, config.trainer, tmp_path / "first").run()
    folder = tmp_path / "first" / "last"
    more = TuneReadingTask(recipe(model_folder, adapter=str(folder), compression=COMPRESSION))
    assert torch.equal(more.bias_scale, task.bias_scale)
    assert task.bias_scale.item() != 0.5
    fresh = TuneReadingTask(config)
    batch = fresh.batch(0, 0, 1)
    with torch.no_grad():
        losses = [float(one(batch)["loss"]) for one in (task, more, fresh)]
    assert losses[0] == losses[1]
    assert losses[0] < losses[2]
    # The folder is a PEFT adapter like any other.
    plain = AutoModelForCausalLM.from_pretrained(model_folder("instruct"), dtype=torch.float32)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(plain, folder)(input_ids=ids).logits
        torch.testing.assert_close(adapted, task.lm(input_ids=ids).logits)


def test_packs_of_further_data_come_at_their_share_and_are_validated(model_folder: Folder, tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(160))
    rows = [{"id": f"t{number}", "text": f"{number} {text}"} for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    several = {"name": "multi-document", "documents": 60, "validation_documents": 40}
    prose = {"name": "continuations", "path": str(tmp_path / "texts.jsonl")}
    packs = {"documents": [4], "questions": 2}
    further = {
        "several": {"share": 0.5, "data": several, "packs": packs},
        "prose": {"share": 0.25, "data": prose, "packs": packs},
    }
    task = TuneReadingTask(recipe(model_folder, further=further))
    drawn: Counter[str] = Counter()
    for step in range(100):
        [question, *_] = task._pack(task._training.data.questions[step % 12], random.Random(step)).questions
        name = "prose" if question.question.startswith("Go on") else "several" if question.further_ids else "news"
        drawn[name] += 1
    assert 40 <= drawn["several"] <= 60
    assert 15 <= drawn["prose"] <= 35
    figures = task.validate()
    assert {"loss_right", "loss_several", "f1_several", "loss_prose"} <= figures.keys()


def test_continuations_are_what_follows_the_document(tmp_path: Path) -> None:
    texts = {f"t{n}": "\n".join(f"{n} says, sentence {line}." for line in range(60)) for n in range(30)} | {
        "no": "Short."
    }
    rows = [json.dumps({"id": name, "text": text, "title": name}) for name, text in texts.items()]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows) + "\n")
    splits = {split: read_continuations(tmp_path, split) for split in ("train", "val")}
    names = [{document.id for document in data.documents} for data in splits.values()]
    assert not names[0] & names[1]
    for data in splits.values():
        assert data.documents
        for document, question in zip(data.documents, data.questions, strict=True):
            beginning = question.question.removeprefix("Go on with this text: ")
            assert " ".join(texts[document.id].split()).startswith(
                " ".join(" ".join((document.text, beginning, question.answers[0])).split())
            )
    (tmp_path / "texts.jsonl").write_text(rows[-1] + "\n")
    with pytest.raises(DataError, match="holds no text of 152 words for the split 'test'"):
        read_continuations(tmp_path, "test")


def test_validation_counts_abstentions_from_right_documents(model_folder: Folder) -> None:
    task = TuneReadingTask(recipe(model_folder, compression=COMPRESSION))
    figures = task.validate()
    settings = ("right", "first", "three", "three_unbiased", "right_coded", "three_coded")
    assert set(figures) == {f"{metric}_{name}" for metric in ("loss", "f1", "em", "abstentions") for name in settings}
    task._answering[0].generate = lambda questions, *_, **__: [ABSTENTION] * len(questions)  # type: ignore[method-assign]
    assert task.validate()["abstentions_right"] == 1.0


@pytest.mark.parametrize("lm", ["instruct", "llama"])  # with a chat template and without
def test_from_an_lm_and_questions_to_its_memory(model_folder: Folder, data: QADataset, tmp_path: Path, lm: str) -> None:
    """The commands of the guide, with a small LM and few steps."""
    texts = {document.id: document.text for document in data.documents}
    rows = [
        {"id": q.id, "document": texts[q.gold], "question": q.question, "answers": q.answers}
        for q in data.questions[:60]
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"trainer.steps": 2, "trainer.validate_every": 2}
    sets = [part for name, value in few.items() for part in ("--set", f"{name}={value}")]
    tuned = command(
        "pipelines.train", "--config", "my-lm-reading", "--output", str(tmp_path / "run"),
        "--set", f"base_lm.name={model_folder(lm)}", "--set", f"data.path={tmp_path / 'mine.jsonl'}", *sets,
    )  # fmt: skip
    assert tuned.exit_code == 0, tuned.output
    model = MACModel.around(
        str(model_folder(lm)),
        list(texts.values()),
        compression=20,
        adapter=tmp_path / "run" / "best",
        sentence_encoder=None,
    )
    plain = MACModel.around(str(model_folder(lm)), compression=None, sentence_encoder=None)
    assert model.fingerprint != plain.fingerprint
    assert len(MACEngine(model).answer(["Who won the cup?"], use_memory=False)) == 1


def test_only_an_lm_that_can_be_trained_is_tuned_after_self_study(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("A mill was built in 1900.")
    asked = command(
        "pipelines.self_study", "--documents", str(tmp_path / "mine.txt"), "--lm", "tests.pipelines.rule_llm:RuleLLM",
        "--output", str(tmp_path / "studied"), "--tune", str(tmp_path / "run"),
    )  # fmt: skip
    assert "--tune trains an LM of transformers" in str(asked.exception)
    assert not (tmp_path / "studied").exists()


class TestRefusals:
    def test_an_lm_of_another_class(self, model_folder: Folder) -> None:
        with pytest.raises(ModelLoadError, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
            TuneReadingTask(recipe(model_folder, base_lm={"name": str(model_folder("gpt2"))}))

    def test_a_document_that_the_window_cannot_hold(self, model_folder: Folder, tmp_path: Path) -> None:
        for name in ("train", "val"):
            (tmp_path / f"{name}.jsonl").write_text(
                f'{{"document": "{name} {"word " * 5000}", "question": "Who?", "answer": "word"}}\n'
                f'{{"document": "A word in {name}.", "question": "What?", "answer": "word"}}\n'
            )
        with pytest.raises(DataError, match=r"document '.*' has [\d,]+ tokens.*window of 4,096.*split the document"):
            TuneReadingTask(recipe(model_folder, data={"name": "own", "path": str(tmp_path)}))

    @pytest.mark.parametrize("adapter", ["nowhere", "empty", "rank"])
    def test_a_folder_without_fitting_updates(
        self, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        if adapter == "rank":
            with monkeypatch.context() as patched:
                patched.setattr(tune_reading, "LORA_RANK", 4)
                TuneReadingTask(recipe(model_folder)).save(tmp_path / "rank")
        with pytest.raises(ModelLoadError, match=f"{adapter} holds no updates of this LM of rank 16"):
            TuneReadingTask(recipe(model_folder, adapter=str(tmp_path / adapter)))

    @pytest.mark.parametrize(
        "values",
        [
            {"packs": {"documents": []}},
            {"packs": {"documents": [0]}},
            {"compression": []},
            {"compression": [0]},
            {"turn": "{document}"},
            {"further": {"a": {"share": 0.6, "data": {}}, "b": {"share": 0.4, "data": {}}}},
            {"compression": [100_000]},
        ],
    )
    def test_values_that_make_no_sense_before_anything_is_trained(self, model_folder: Folder, values: Any) -> None:
        with pytest.raises(MACError):
            TuneReadingTask(recipe(model_folder, **values)).begin_step(0)
