"""The prompts of self-study, instructions and fixed examples for each kind; and the reading of what the LM writes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mac_rag.data.characters import fault_of, is_blank
from mac_rag.data.metrics import normalize
from pipelines.synthesis.candidates import SPAN_KINDS, Candidate, sentence_of


@dataclass(frozen=True)
class Conversation:
    """An instruction for an LM, requests with the desired answers as examples, and the request that it is to answer.

    An LM of our own continues the `opening` of an answer; empty for any beginning.
    """

    instruction: str
    examples: tuple[tuple[str, str], ...]
    request: str
    opening: str = ""


@dataclass(frozen=True)
class Written:
    """A question that the LM wrote, with the answer that was chosen from the passage or that the LM wrote."""

    question: str
    answer: str


# Texts about things that do not exist, so that no answer of an example is right elsewhere.
_BRIDGE = (
    "The Kestrel Bridge in Ardenne was designed by Ada Lindqvist and opened in March 1931. It is 412 metres long and "
    "carries two railway lines across the river Orne. In 1987 it was closed for a year, because its steel cables had "
    "rusted."
)
_SALT = (
    "Solvane is a white salt that is won from the leaves of the marsh aster. Chemists of the company Brandt & Sons "
    "first made it in 1874. It melts at 61 degrees and is used in glazes, since it makes them shine. Today about 900 "
    "tonnes of it are sold each year, most of them to potters in Portugal."
)
# Subjects of the examples, as single words.
EXAMPLE_NAMES = frozenset({"kestrel", "solvane", "ardenne", "lindqvist"})
_TO_ANSWER = (
    "Write one question about the passage whose answer is the given answer. Name what the question is about. Do not "
    "write the answer into the question."
)
_ABOUT = "Name what the question is about, and take the answer from the passage."
_INSTRUCTIONS = {
    **dict.fromkeys(SPAN_KINDS, _TO_ANSWER),
    "definition": f"Write one question that asks what something in the passage is, and its answer. {_ABOUT}",
    "reason": f"Write one question that asks why or how something in the passage happened, and its answer. {_ABOUT}",
    "overview": f"Write one question that takes the whole passage to answer, and its answer in one sentence. {_ABOUT}",
}
# For each kind: passage, answer, question.
_EXAMPLES = {
    "name": (
        (_BRIDGE, "Ada Lindqvist", "Who designed the Kestrel Bridge?"),
        (_SALT, "Portugal", "Where do most of the potters live who buy solvane?"),
    ),
    "date": (
        (_BRIDGE, "March 1931", "When was the Kestrel Bridge in Ardenne opened?"),
        (_SALT, "1874", "When was solvane made for the first time?"),
    ),
    "number": (
        (_BRIDGE, "412", "How many metres long is the Kestrel Bridge?"),
        (_SALT, "900", "How many tonnes of solvane are sold each year?"),
    ),
    "phrase": (
        (_BRIDGE, "steel cables", "What had rusted on the Kestrel Bridge when it was closed in 1987?"),
        (_SALT, "white salt", "What is won from the leaves of the marsh aster?"),
    ),
    "definition": (
        (_SALT, "a white salt that is won from the leaves of the marsh aster", "What is solvane?"),
        (_BRIDGE, "a bridge that carries two railway lines across the river Orne", "What is the Kestrel Bridge?"),
    ),
    "reason": (
        (_BRIDGE, "because its steel cables had rusted", "Why was the Kestrel Bridge closed in 1987?"),
        (_SALT, "because it makes them shine", "Why is solvane used in glazes?"),
    ),
    "overview": (
        (
            _BRIDGE,
            "It was designed by Ada Lindqvist, opened in March 1931, and closed in 1987 because its cables had rusted.",
            "What is the history of the Kestrel Bridge?",
        ),
        (
            _SALT,
            "It is won from the leaves of the marsh aster and used in glazes, since it makes them shine.",
            "How is solvane won, and what is it used for?",
        ),
    ),
}
_TO_ANSWER_FORM = "Passage: {passage}\n\nSentence: {sentence}\n\nAnswer: {answer}\n\nBegin with: {opening}"
# For short answers (True) and others: instruction, and questions about the first example with their answers.
_READING = {
    True: (
        "Answer the question with a few words from the passage.",
        (("Who designed the Kestrel Bridge?", "Ada Lindqvist"), ("How long is it?", "412 metres")),
    ),
    False: (
        "Answer the question in one sentence, with words from the passage.",
        (
            ("Why was the Kestrel Bridge closed in 1987?", "because its steel cables had rusted"),
            ("What is the Kestrel Bridge?", "a bridge that carries two railway lines across the river Orne"),
        ),
    ),
}
_QUESTION = re.compile(r"^\W{0,3}question\W{0,3}[:.]\s*", re.IGNORECASE)
_ANSWER = re.compile(r"\s*(?:^|\n)\W{0,3}answer\W{0,3}:\s*", re.IGNORECASE)
_FEWEST_WORDS, _MOST_WORDS = 3, 40  # of a question
_MOST_ANSWER_WORDS = 60
_QUOTES = "\"'“”‘’*` "
QUESTION_TOKENS, PAIR_TOKENS, SHORT_TOKENS, LONG_TOKENS = 48, 112, 24, 64


def asking(passage: str, candidate: Candidate) -> Conversation:
    """The conversation in which the LM writes a question, and for the kinds of `OPEN_KINDS` its answer."""
    kind, shown = candidate.kind, []
    for text, answer, question in _EXAMPLES[kind]:
        if candidate.answer is None:
            shown.append((f"Passage: {text}", f"Question: {question}\nAnswer: {answer}"))
        else:
            sentence = sentence_of(text, text.index(answer))
            shown.append((_to_answer(text, Candidate(kind, answer, sentence)), question))
    if candidate.answer is None:
        return Conversation(_INSTRUCTIONS[kind], tuple(shown), f"Passage: {passage}", "Question:")
    return Conversation(_INSTRUCTIONS[kind], tuple(shown), _to_answer(passage, candidate), candidate.opening)


def _to_answer(passage: str, candidate: Candidate) -> str:
    return _TO_ANSWER_FORM.format(
        passage=passage,
        sentence=candidate.sentence,
        answer=candidate.answer,
        opening=candidate.opening or "Who, What, Where or Which",
    )


def reading(passage: str, kind: str, question: str) -> Conversation:
    """The conversation in which the LM answers a question of a kind after the passage."""
    instruction, ((first, answer), second) = _READING[kind in SPAN_KINDS]
    return Conversation(instruction, ((f"{_BRIDGE}\n\n{first}", answer), second), f"{passage}\n\n{question}")


def most_tokens(kind: str, *, answer: bool) -> int:
    """Largest number of tokens that the LM writes: of an answer, or of its reply to `asking`."""
    if answer:
        return SHORT_TOKENS if kind in SPAN_KINDS else LONG_TOKENS
    return QUESTION_TOKENS if kind in SPAN_KINDS else PAIR_TOKENS


def read_question(candidate: Candidate, text: str) -> Written | None:
    """The question, and the answer if the LM writes it, in what the LM has written; None if there is none.

    Text after the first question mark is left out.

    Examples:
        >>> read_question(Candidate("reason"), "Question: Why did it rust?\\nAnswer: because of the rain")
        Written(question='Why did it rust?', answer='because of the rain')
        >>> read_question(Candidate("name", "Ada"), "Ada designed it.") is None
        True
    """
    written, *rest = _ANSWER.split(text.strip(), maxsplit=1)
    lines = [line.strip() for line in _QUESTION.sub("", written).strip().splitlines() if line.strip()]
    question, mark, _ = (lines[0] if lines else "").partition("?")
    question = f"{question.strip().lstrip(_QUOTES)}?"
    words = len(question.split())
    answer = candidate.answer if candidate.answer is not None else read_answer(rest[0] if rest else "")
    if not mark or not _FEWEST_WORDS <= words <= _MOST_WORDS or answer is None or not is_text(question):
        return None
    return Written(question, answer)


def read_answer(text: str) -> str | None:
    """The answer in what the LM has written: its first line; None if there is none, or it is far too long.

    Examples:
        >>> read_answer(' "March 1931."\\nMarch 1931 was'), read_answer("...")
        ('March 1931', None)
    """
    lines = [line.strip() for line in _ANSWER.sub("\n", text).strip().splitlines() if line.strip()]
    answer = (lines[0] if lines else "").strip(_QUOTES).removesuffix(".").strip(_QUOTES)
    return answer if normalize(answer) and len(answer.split()) <= _MOST_ANSWER_WORDS and is_text(answer) else None


def is_text(text: str) -> bool:
    """True for what the library takes as a text."""
    return fault_of(text) is None and not is_blank(text)
