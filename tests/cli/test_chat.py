"""`mac-rag chat`: questions from a pipe and from a terminal, and what becomes of the conversation."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mac_rag.cli.chat import Conversation
from mac_rag.cli.main import app
from mac_rag.engine import MACEngine
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from tests.cli.helpers import run

TEXTS = {"a": "Ada Voss opened the harbour of Lund in May.", "b\x1b[2J": "The bridge of Orm was closed."}


@pytest.fixture(params=["tiny_checkpoint", "chat_checkpoint"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def bank(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    rows = "".join(f'{{"id": "{name}", "text": "{text}"}}\n'.replace("\x1b", "\\u001b") for name, text in TEXTS.items())
    (tmp_path / "rows.jsonl").write_text(rows)
    options = ("--model", tiny_checkpoint, "--retriever", "bm25")
    assert run("adapt", tmp_path / "rows.jsonl", "--bank", tmp_path / "bank", *options).exit_code == 0
    return tmp_path / "bank"


def chat(bank: Path, text: str | bytes, *options: object) -> Result:
    return CliRunner().invoke(app, ["chat", "--bank", str(bank), *map(str, options)], input=text)


def test_lines_of_a_pipe_are_answered_as_ask_answers_them(bank: Path) -> None:
    questions = ("Who opened the harbour?", "What was closed?")
    expected = "".join(run("ask", question, "--bank", bank).stdout for question in questions)
    done = chat(bank, f"{questions[0]}\n\n  {questions[1]} ")
    assert (done.exit_code, done.stdout) == (0, expected), done.output


def test_commands_and_sources(bank: Path) -> None:
    retriever = ("--retriever", "bm25", "--k", 1)
    done = chat(bank, "/sources\n/help\nWhich bridge was closed?\n/sources\n/quit\nWho?\n", *retriever)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("no question was answered yet\n/sources  the documents")
    assert "retrieved: b\\u001b[2J\n" in done.stdout
    assert "\x1b" not in done.stdout
    table = done.stdout.partition("retrieved:")[2]
    assert table.count("%") == 2
    assert chat(bank, "/nonsense\n").stderr == "/nonsense is not a command; /help lists them\n"


def test_an_error_is_told_and_the_conversation_goes_on(bank: Path) -> None:
    done = chat(bank, b"\xff?\nWho opened the harbour?\n")
    assert done.exit_code == 1
    assert "half of a surrogate pair" in done.stderr
    assert done.stdout == run("ask", "Who opened the harbour?", "--bank", bank).stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("interruptible")
def test_at_a_terminal_ctrl_c_cancels_and_ctrl_d_ends(bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    typed: Iterator[Any] = iter(["Who?", KeyboardInterrupt, "When?", EOFError])

    def answer(self: Conversation, question: str) -> None:
        asked.append(question)
        if question == "Who?":
            signal.raise_signal(signal.SIGINT)

    def enter(prompt: str) -> str:
        assert prompt == "> "
        value = next(typed)
        if isinstance(value, str):
            return value
        raise value

    monkeypatch.setattr(Conversation, "ask", answer)
    monkeypatch.setattr("builtins.input", enter)
    with monkeypatch.context() as patch:
        patch.setattr("mac_rag.cli.chat.sys", type("sys", (), {"stdin": Terminal()}))
        done = CliRunner().invoke(app, ["chat", "--bank", str(bank)])
    assert done.exit_code == 0, done.output
    assert asked == ["Who?", "When?"]
    assert "holds 2 documents" in done.stderr
    assert "(cancelled)" in done.stderr


def prompts_of(
    checkpoint: Path, questions: list[str], window: int | None = None
) -> tuple[MACEngine, list[FittedPrompt]]:
    engine = MACEngine(MACModel.from_pretrained(checkpoint), retriever=BM25Retriever(), k=1)
    from mac_rag.data.types import Document

    engine.adapt([Document(name, text) for name, text in TEXTS.items()])
    prompts: list[FittedPrompt] = []

    def stream(prompt: FittedPrompt) -> Iterator[str]:
        prompts.append(prompt)
        return iter([f"answer {len(prompts)}", "\x1b."])

    engine.stream = stream  # type: ignore[method-assign,assignment]
    if window is not None:
        engine.model.config = engine.model.config.model_copy(update={"context_window": window})
    conversation = Conversation(engine)
    for question in questions:
        conversation.ask(question)
    return engine, prompts


def test_only_a_chat_format_reads_what_was_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, prompts = prompts_of(checkpoint, ["Who opened the harbour?", "Which bridge was closed?"])
    assert capsys.readouterr().out == "answer 1\\u001b.\nanswer 2\\u001b.\n"
    written = [engine.model.base_lm.prompts.tokenizer.decode(prompt.ids) for prompt in prompts]
    is_chat = engine.model.config.prompt.chat
    assert ("Who opened the harbour?" in written[1]) == is_chat
    assert ("answer 1" in written[1]) == is_chat
    assert TEXTS["b\x1b[2J"] in written[1]
    assert TEXTS["a"] not in written[1]  # what was retrieved before is left out
    assert [prompt.question for prompt in prompts] == ["Who opened the harbour?", "Which bridge was closed?"]


def test_the_oldest_exchanges_make_room(chat_checkpoint: Path) -> None:
    questions = [f"Which bridge was closed {count} times?" for count in ("one", "two", "six", "ten", "no")]
    engine, prompts = prompts_of(chat_checkpoint, questions)
    room = len(prompts[2].ids)
    assert len(prompts[-1].ids) > room
    engine, prompts = prompts_of(chat_checkpoint, questions, room + engine.model.config.max_new_tokens)
    assert all(len(prompt.ids) <= room for prompt in prompts)
    last = engine.model.base_lm.prompts.tokenizer.decode(prompts[-1].ids)
    assert [question in last for question in questions] == [False, False, True, True, True]
    assert TEXTS["b\x1b[2J"] in last
    engine, prompts = prompts_of(chat_checkpoint, questions, len(prompts[0].ids) + engine.model.config.max_new_tokens)
    for before, prompt in zip(questions, prompts[1:]):
        assert before not in engine.model.base_lm.prompts.tokenizer.decode(prompt.ids)


def test_a_cancelled_answer_is_no_part_of_the_conversation(chat_checkpoint: Path) -> None:
    engine, prompts = prompts_of(chat_checkpoint, ["Who opened the harbour?"])
    conversation = Conversation(engine)

    def stream(prompt: FittedPrompt) -> Iterator[str]:
        prompts.append(prompt)
        yield "half"
        if len(prompts) == 2:
            raise KeyboardInterrupt

    engine.stream = stream  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("Which bridge was closed?")
    assert conversation.question is None
    conversation.ask("Who opened the harbour?")
    assert prompts[2].ids == prompts[0].ids
