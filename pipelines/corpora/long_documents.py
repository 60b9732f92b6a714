"""Splits documents that are longer than a network reads at once into several, before training starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from mac_rag.cli.terminal import say
from mac_rag.data.characters import shown_id
from mac_rag.data.metrics import normalize
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import DataError, DocumentError
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.model import AmortizedModel
from mac_rag.model.text_encoder import split
from mac_rag.progress import progress_bar


def within_limits(data: QADataset, model: AmortizedModel, *, reconstruction: bool = False) -> QADataset:
    """A data set whose documents and questions a MAC model reads at once; see `divided`.

    Args:
        model: its amortization network reads documents of at most `max_document_tokens`, its input encoder questions,
            and its LM questions with answers.
        reconstruction: True if the LM must also write whole documents, for the loss of this name.

    Raises:
        DocumentError: for a document without a visible character, or with forbidden characters; names it.
        DataError: for a question that is too long, alone or with its answer; names it.
    """
    prompts = model.base_lm.prompts
    window = model.base_lm.context_window - model.modulation.prefix_length
    for question in data.questions:
        try:
            model.input_encoder.ids(question.question)
            used = len(prompts.prompt(question.question)) + len(prompts.answer(question.answers[0]))
        except DocumentError as error:
            raise DataError(f"question {shown_id(question.id)}: {error}") from None
        if used > window:
            raise DataError(
                f"question {shown_id(question.id)} takes {used:,} tokens with its answer, and the LM reads {window:,} "
                "at once; shorten the answer, or leave the question out"
            )
    # Room for a document's tokens without its template, less one for a tokenizer that puts a token before each text.
    room = window - len(prompts.prompt_start(["x"])) + len(prompts.texts.ids("x")) - 1

    def chunks(document: Document) -> list[str]:
        texts = model.amortization.split(document.text)
        if not reconstruction:
            return texts
        return [chunk.text for text in texts for chunk in split(text, prompts.texts, room)]

    return divided(data, chunks, f"{model.amortization.max_tokens} tokens" + " or the LM's window" * reconstruction)


def within_sequences(data: QADataset, encoder: PromptEncoder, length: int) -> QADataset:
    """A data set whose documents fit into a training sequence before each of their questions and answers.

    Otherwise a sequence, which is cut at its front, would lose the beginning of the document, and the answer with it.
    If a question takes more than three quarters of a sequence of `length` tokens, the documents still get a quarter.

    Raises:
        DocumentError: as `within_limits`.
    """
    template = len(encoder.prompt("", ["x"])) - len(encoder.prompt("")) - len(encoder.texts.ids("x"))
    questions_of = data.questions_by_document()

    def chunks(document: Document) -> list[str]:
        about = [(question.question, question.answers[0]) for question in questions_of[document.id]]
        after = max((len(encoder.prompt(q)) + len(encoder.answer(a)) for q, a in about), default=0)
        room = max(length - after - template, length // 4)
        return [chunk.text for chunk in split(document.text.strip(), encoder.texts, room)]

    return divided(data, chunks, f"a sequence of {length} tokens with their questions")


def divided(data: QADataset, chunks_of: Callable[[Document], Sequence[str]], limit: str) -> QADataset:
    """A data set with a document for each chunk; the first chunk keeps the document's id, and all keep its metadata.

    A question goes to the chunk that holds its answer: its first answer, or else another one, as it is written, or else
    without regard to case, punctuation and articles. If several chunks hold it, the question goes to the one that
    shares most words with it; if none does, to the first. A message on standard error counts the divided documents.

    Args:
        data: the data set. If no document is divided, it is returned as it is.
        chunks_of: the chunks of a document; one if it is within the limit.
        limit: description of the limit for the message.

    Raises:
        DocumentError: as `chunks_of`; it names the document.
    """
    chunks: dict[str, list[Document]] = {}
    taken = {document.id for document in data.documents}
    with progress_bar("measure", len(data.documents)) as bar:
        for document in data.documents:
            try:
                texts = chunks_of(document)
            except DocumentError as error:
                raise DocumentError(f"document {shown_id(document.id)}: {error}") from None
            if len(texts) > 1:
                chunks[document.id] = _chunks(document, texts, taken)
            bar.advance()
    if not chunks:
        return data
    documents = [chunk for document in data.documents for chunk in chunks.get(document.id, [document])]
    questions = [_moved(question, chunks) for question in data.questions]
    say(
        f"{data.name}, {data.split}: {len(chunks):,} of {len(data.documents):,} documents are longer than {limit}; "
        f"they are divided into {sum(map(len, chunks.values())):,} documents",
        err=True,
    )
    return dataclasses.replace(data, documents=tuple(documents), questions=tuple(questions))


def _chunks(document: Document, texts: Sequence[str], taken: set[str]) -> list[Document]:
    names = [document.id]
    number = 1
    while len(names) < len(texts):
        number += 1
        if f"{document.id}#{number}" not in taken:
            names.append(f"{document.id}#{number}")
    taken.update(names)
    return [dataclasses.replace(document, id=name, text=text) for name, text in zip(names, texts, strict=True)]


def _moved(question: Question, chunks: dict[str, list[Document]]) -> Question:
    among = chunks.get(question.gold)
    return question if among is None else dataclasses.replace(question, document_id=_best(question, among).id)


def _best(question: Question, chunks: Sequence[Document]) -> Document:
    """The chunk that a question goes to; see `divided`."""
    words = set(normalize(question.question).split())
    padded = [f" {normalize(chunk.text)} " for chunk in chunks]
    written = [[answer in chunk.text for chunk in chunks] for answer in question.answers]
    spoken = [[f" {normalize(answer)} " in text for text in padded] for answer in question.answers]
    for holds in (*written, *spoken):
        if any(holds):
            places = [place for place, holding in enumerate(holds) if holding]
            return chunks[max(places, key=lambda place: len(words.intersection(padded[place].split())))]
    return chunks[0]
