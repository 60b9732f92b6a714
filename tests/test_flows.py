"""Documents are tokenized once on their way to the segment, questions once for each network on theirs to the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from typer.testing import CliRunner

from mac_rag.cli.main import app
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.integrations.llama_index import MACLLM, MACSynthesizer
from mac_rag.lm.text_tokenizer import TextTokenizer
from mac_rag.model import MACModel

TEXTS = ("Anna Berg opened the bridge of Norrland in May.", "The museum of Sola is led by Peter Holm.")
QUESTION = "Who opened the bridge?"
TEMPLATE = PromptTemplate("{context_str}\n{query_str}")


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each text is tokenized from now on."""
    calls: Counter[str] = Counter()

    def counted(tokenize: Any) -> Any:
        def counting(self: TextTokenizer, texts: str | list[str], **options: Any) -> Any:
            calls.update([texts] if isinstance(texts, str) else texts)
            return tokenize(self, texts, **options)

        return counting

    for name in ("ids", "batch", "batch_with_spans"):
        monkeypatch.setattr(TextTokenizer, name, counted(getattr(TextTokenizer, name)))
    return calls


def containing(calls: Counter[str], text: str) -> dict[str, int]:
    return {seen: count for seen, count in calls.items() if text in seen}


@pytest.mark.parametrize("retriever", [[], ["--retriever", "bm25"]])
def test_adapting_tokenizes_a_document_once(
    retriever: list[str], tiny_checkpoint: Path, tmp_path: Path, tokenized: Counter[str]
) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    files = [str(tmp_path / f"{number}.txt") for number in range(len(TEXTS))]
    command = ["adapt", *files, "--bank", str(tmp_path / "bank"), "--model", str(tiny_checkpoint), *retriever]
    finished = CliRunner().invoke(app, command)
    assert finished.exit_code == 0, finished.output
    assert [containing(tokenized, text) for text in TEXTS] == [{text: 1} for text in TEXTS]
    tokenized.clear()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert not any(containing(tokenized, text) for text in TEXTS)  # what is known is not looked at again


def test_a_long_document_is_tokenized_whole_and_in_its_chunks(tiny_model: MACModel, tokenized: Counter[str]) -> None:
    text = " ".join(f"Event number {number} took place." for number in range(400))
    report = MACEngine(tiny_model).adapt([Document("long", text)])
    assert report.rows > 2
    assert set(tokenized.values()) == {1}
    assert sum(map(len, tokenized)) < 2.01 * len(text)


@pytest.mark.parametrize("way", ["predict", "stream", "synthesize"])
def test_an_answer_tokenizes_its_texts_once_a_network(way: str, tiny_model: MACModel, tokenized: Counter[str]) -> None:
    engine = MACEngine(tiny_model)
    engine.adapt([Document(str(number), text) for number, text in enumerate(TEXTS)])
    llm, prompts = MACLLM(engine=engine), tiny_model.base_lm.prompts
    tokenized.clear()
    if way == "synthesize":
        MACSynthesizer(llm).synthesize(QUESTION, [NodeWithScore(node=TextNode(text=TEXTS[0]))])
    else:
        "".join(getattr(llm, way)(TEMPLATE, query_str=QUESTION, context_str=TEXTS[0]))
    asked = prompts.format.question.replace("{question}", QUESTION)
    assert containing(tokenized, QUESTION) == {QUESTION: 1, asked: 1}  # the input encoder's and the base LM's
    assert containing(tokenized, TEXTS[0]) == {prompts.format.document.replace("{document}", TEXTS[0]): 1}
