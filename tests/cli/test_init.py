"""`mac-rag init`: a memory for an LM of one's own, from its first check to an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_rag.data.newswire.generate import generate
from mac_rag.model import MACModel, OwnKVModel
from tests.cli.helpers import refusal, run
from tests.helpers import Folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 30 documents."""
    folder = tmp_path_factory.mktemp("texts")
    for number, document in enumerate(generate("train", 30).documents):
        (folder / f"{number:02}.txt").write_text(document.text)
    return folder


def test_from_an_lm_and_documents_to_an_answer(model_folder: Folder, texts: Path, tmp_path: Path) -> None:
    lm = model_folder("instruct")
    made = run("init", tmp_path / "own", "--lm", lm, "--documents", texts, "--compression", 4)
    assert made.exit_code == 0, made.output
    assert "a document in memory gives the same answer as its text" in made.stdout
    assert "how 3 other documents go on, in nats a token" in made.stdout  # a tenth is held out
    bank = tmp_path / "bank.mac"
    adapted = run("adapt", texts, "--bank", bank, "--model", tmp_path / "own")
    assert adapted.stdout == f"30 added, 0 updated, 0 unchanged; {bank} holds 30 documents\n"
    asked = run("ask", "Which cup?", "--bank", bank, "--explain")  # the bank knows the folder of its model
    assert asked.exit_code == 0, asked.output
    assert ".txt" in asked.stdout
    assert "bytes a token" in run("bank", "info", "--bank", bank).stdout
    assert run("bank", "verify", "--bank", bank).exit_code == 0
    both = run("ask", "Which cup?", "--bank", bank, "--retriever", "bm25", "--k", 3)
    assert both.exit_code == 0, both.output


def test_without_documents_keys_and_values_stay_as_they_are(model_folder: Folder, tmp_path: Path) -> None:
    made = run("init", tmp_path / "own", "--lm", model_folder("llama"), "--compression", "none", "--dtype", "fp32")
    assert made.exit_code == 0, made.output
    model = MACModel.from_pretrained(tmp_path / "own")
    assert isinstance(model, OwnKVModel)
    assert model.codec is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compression", "much"], "--compression is 'much'; give a number such as 20, or none"),
        (["--compression", "0"], "--compression is '0'; give a number such as 20, or none"),
        ([], "--compression 20 needs documents that the codec is fitted on, and there are 0"),
    ],
)
def test_bad_input_makes_no_folder(model_folder: Folder, tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in refusal("init", tmp_path / "own", "--lm", model_folder("llama"), *arguments)
    assert not (tmp_path / "own").exists()


def test_a_folder_with_something_in_it_is_left_alone(model_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert "is not empty; name a new folder" in refusal("init", tmp_path, "--lm", model_folder("llama"))
