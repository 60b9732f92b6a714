"""`mac-rag chat`: a conversation with a bank, with streamed answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
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

# Exchanges that are kept for later prompts; few LMs have a window for more.
_MOST_EXCHANGES = 32
_HELP = (
    "/sources  the documents that the last answer came from\n"
    "/help     this list\n"
    "/quit     end the chat, as Ctrl-D does\n"
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

    A model whose prompt format is a chat reads the conversation before each question, as far as it fits its window,
    without the documents retrieved for earlier questions. Other models read each question by itself. A question sees
    all that other processes have committed to the bank before.

    If standard input is not a terminal, each line of it is a question, and the exit code is 1 if one had no answer.
    """
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.engine import MACEngine

    opened = MemoryBank.open(bank)
    text_retriever = open_retriever(retriever, retriever_folder, opened)
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
    """The questions and answers so far.

    Args:
        engine: answers the questions.

    Attributes:
        question: the prompt of the last question that was answered; None before the first.
        answer: its answer.
        read: document id -> text as the LM read it, for the documents retrieved for it.
    """

    def __init__(self, engine: MACEngine) -> None:
        self.question: FittedPrompt | None = None
        self.answer = ""
        self.read: dict[str, str] = {}
        self.engine = engine
        self._exchanges: list[tuple[str, str]] = []

    def ask(self, question: str) -> None:
        """Asks a question, and prints the answer piece by piece. After an error, the conversation is unchanged.

        Raises:
            MACError: as `MACEngine.answer`.
        """
        from mac_rag.sources import texts_read

        engine = self.engine
        engine.refresh()
        hits = [] if engine.retriever is None else engine.retriever.retrieve([question], engine.k)[0]
        prompt = engine.fit(hits, lambda texts: self._prompt(question, texts))
        pieces = []
        for piece in engine.stream(prompt):
            pieces.append(piece)
            say(piece, lines=True, nl=False, reset=False)
        say("")
        self.question, self.answer = prompt, "".join(pieces)
        self.read = texts_read(hits, prompt)
        self._exchanges = [*self._exchanges, (question, self.answer)][-_MOST_EXCHANGES:]

    def _prompt(self, question: str, texts: Sequence[str]) -> FittedPrompt:
        """The prompt: documents, then the question; in a chat, first as many of the last exchanges as fit."""
        from mac_rag.asking import conversation_prompt
        from mac_rag.lm.chat import Message

        model = self.engine.model
        alone = model.fit_to_window(question, texts, overflow="truncate")
        if not model.config.prompt.chat:
            return alone
        before = [
            message
            for earlier, answer in self._exchanges
            for message in (Message("user", earlier), Message("assistant", answer))
        ]
        for first in range(0, len(before), 2):
            with suppress(PromptError):  # the prompt exceeds the window
                fitted = conversation_prompt(model, before[first:], question, texts, None)
                if fitted.contexts == alone.contexts:  # documents come before old exchanges
                    return fitted
        return alone


def _obey(command: str, conversation: Conversation) -> None:
    if command == "/help":
        say(_HELP, lines=True)
    elif command == "/sources":
        if conversation.question is None:
            say("no question was answered yet")
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
        say(f"{command} is not a command; /help lists them", err=True)


def _typed_lines() -> Iterator[str]:
    """The lines typed at the terminal, until Ctrl-D. Ctrl-C drops a line."""
    with suppress(ImportError):  # not every system has it; it adds line editing and history
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
    """The lines of standard input. Bytes that are not UTF-8 become surrogates, which `check_text` refuses."""
    for line in sys.stdin.buffer:
        yield line.decode(errors="surrogateescape")
