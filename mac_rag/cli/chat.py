"""`mac-rag chat`: asks a bank question after question, with streamed answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.models import load_model
from mac_rag.cli.options import (
    BankModelOption,
    BankOption,
    DeviceMapOption,
    FolderOption,
    RetrieverOption,
    open_retriever,
    warn_of_disagreement,
)
from mac_rag.cli.terminal import SHOWN, say, show_sources
from mac_rag.errors import MACError, PromptError

if TYPE_CHECKING:
    from mac_rag.engine import MACEngine
    from mac_rag.lm.prompt import FittedPrompt

# Exchanges that are remembered; few LMs have a window for more.
_MOST_EXCHANGES = 32
_HELP = (
    "/sources  the documents that the last answer came from\n"
    "/help     this list\n"
    "/quit     the end, as Ctrl-D\n"
    "Ctrl-C cancels an answer."
)


def chat(
    bank: BankOption,
    model: BankModelOption = None,
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
    k: Annotated[int, typer.Option(min=1, help="Number of retrieved documents in front of each question.")] = 5,
    device_map: DeviceMapOption = None,
) -> None:
    """Ask a bank question after question. /help lists the commands; Ctrl-C cancels an answer, and Ctrl-D ends.

    A model whose prompt format is a chat reads the conversation before each question, as far as it fits its window;
    what was retrieved for earlier questions is left out. Other models read each question by itself. What another
    process commits to the bank counts from the next question on.

    If standard input is no terminal, each line of it is a question, and the exit code is 1 if one had no answer.
    """
    from mac_rag.engine import MACEngine
    from mac_rag.memory.bank import MemoryBank

    opened, text_retriever = MemoryBank.open(bank), open_retriever(retriever, retriever_folder)
    engine = MACEngine(load_model(model, opened, bank, device_map=device_map), opened, text_retriever, k=k)
    warn_of_disagreement(engine.bank, engine.retriever, retriever, retriever_folder)
    conversation = Conversation(engine)
    typed = sys.stdin.isatty()
    if typed:
        say(f"{bank} holds {len(opened):,} documents. /help lists the commands.", err=True)
    failed = False
    for line in _typed_lines() if typed else _piped_lines():
        text = line.strip()
        if text in ("/quit", "/exit"):
            break
        try:
            if text.startswith("/"):
                _obey(text, conversation)
            elif text:
                conversation.ask(text)
        except MACError as error:
            failed = True
            say(f"error: {error}".replace("\n", "\n  "), lines=True, err=True, fg="red")
        except KeyboardInterrupt:
            say("\n(cancelled)", lines=True, err=True)
    if failed and not typed:
        raise typer.Exit(1)


class Conversation:
    """Questions and answers so far, and how the next question is asked.

    Args:
        engine: answers the questions.

    Attributes:
        question: the last question that was answered; None before.
        answer: the answer.
        read: the documents that were retrieved for it, by their ids, as the LM read them.
    """

    def __init__(self, engine: MACEngine) -> None:
        self.question: str | None = None
        self.answer = ""
        self.read: dict[str, str] = {}
        self.engine = engine
        self._exchanges: list[tuple[str, str]] = []

    def ask(self, question: str) -> None:
        """Prints the answer piece by piece. A question without an answer does not become part of the conversation.

        Raises:
            MACError: as `MACEngine.answer`.
        """
        from mac_rag.sources import texts_read

        engine = self.engine
        engine.refresh()
        hits = [] if engine.retriever is None else engine.retriever.retrieve([question], engine.k)[0]
        texts = [hit.text for hit in hits]
        prompt = self._prompt(question, texts)
        pieces = []
        for piece in engine.stream(prompt):
            pieces.append(piece)
            say(piece, lines=True, nl=False, reset=False)
        say("")
        self.question, self.answer = question, "".join(pieces)
        self.read = texts_read([hit.document_id for hit in hits], texts, prompt.contexts)
        self._exchanges = [*self._exchanges, (question, self.answer)][-_MOST_EXCHANGES:]

    def _prompt(self, question: str, texts: list[str]) -> FittedPrompt:
        """The question behind documents; in a chat, also behind as many of the last exchanges as fit."""
        from mac_rag.lm.chat import Message

        model = self.engine.model
        alone = model.fit_to_window(question, texts, overflow="truncate")
        if not model.config.prompt.chat:
            return alone
        said = [
            message
            for asked, answer in self._exchanges
            for message in (Message("user", asked), Message("assistant", answer))
        ]
        said.append(Message("user", "".join(map(model.base_lm.prompts.written_document, texts)) + question))
        for first in range(0, len(said) - 1, 2):
            with suppress(PromptError):  # beyond the window
                fitted = model.fit_conversation(said[first:], question=question, contexts=texts)
                if fitted.contexts == alone.contexts:  # documents are worth more than old exchanges
                    return fitted
        return alone


def _obey(command: str, conversation: Conversation) -> None:
    if command == "/help":
        say(_HELP, lines=True)
    elif command == "/sources":
        if conversation.question is None:
            say("nothing was answered yet")
            return
        for document_id in conversation.read:
            say(f"retrieved: {document_id}")
        show_sources(
            conversation.engine.sources(
                conversation.question, conversation.answer, most=SHOWN, texts=conversation.read
            ),
            conversation.answer,
        )
    else:
        say(f"{command} is no command; /help lists them", err=True)


def _typed_lines() -> Iterator[str]:
    """What is typed, until Ctrl-D. Ctrl-C drops a line."""
    with suppress(ImportError):  # not every system has it; with it, lines can be edited and come back
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            say("", err=True)
            return
        except KeyboardInterrupt:
            say("", err=True)


def _piped_lines() -> Iterator[str]:
    """The lines of standard input. Bytes that are not UTF-8 become what is refused as no character."""
    for line in sys.stdin.buffer:
        yield line.decode(errors="surrogateescape")
