"""How prompts are written: with templates of our own, or with the chat template of an instruct LM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptFormat:
    """Templates of the text around a document, a question and an answer.

    Document, question and answer are tokenized one by one and joined as ids. So a boundary never changes a token, and
    `d + x` starts with exactly the ids of `d`.

    Examples:
        >>> prompt = PromptFormat(document="Context: {document}\\n\\n", question="Q: {question}\\nA:")
        >>> prompt.question.format(question="Who?")
        'Q: Who?\\nA:'

    With `chat`, the tokenizer's own chat template writes the system message, the user's turn, which holds documents and
    question, and the start of the assistant's turn. The LM must be an instruct LM.

    Attributes:
        document, question, answer: the templates; a chat has only the document's.
        abstention: the answer that the LM has learned for questions whose answer does not stand in front of them, such
            as "I don't know"; None if it has learned none. It abstains where it holds that more probable than all
            answers together (see `mac_rag.lm.decoding`).
        parallel_documents: True if the LM has learned to read several documents in parallel: each one with the
            question, none sees another, and the question once more behind them (see `mac_rag.lm.prompt`).
            Only for an LM whose attention takes segments.
        chat: True to write prompts with the tokenizer's chat template.
        system: the system message of a chat; None for what the chat template writes by itself.
    """

    document: str = "{document}\n"
    question: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"
    abstention: str | None = None
    parallel_documents: bool = False
    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        for name in ("question", "answer"):
            given, default = getattr(self, name), getattr(PromptFormat, name)
            if self.chat and given != default:
                raise ValueError(
                    f"the {name} template is {given!r}, but in a chat the tokenizer's template stands around the "
                    f"{name}; leave it out, or say in `system` how to answer"
                )
        if self.chat and self.parallel_documents:
            raise ValueError("parallel_documents is true, but a conversation is one text; set chat: false")
        if self.system is not None and not self.chat:
            raise ValueError(f"system is {self.system!r}, but only a chat has a system message; set chat: true")
        for name in ("document", "question", "answer"):
            template = getattr(self, name)
            if template.count("{" + name + "}") != 1:
                raise ValueError(f"the {name} template must hold {{{name}}} exactly once, got {template!r}")
