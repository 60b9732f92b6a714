"""What a prompt template asks of MAC: question and context, read from the template's slots and never from its text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_index.core.chat_engine.condense_plus_context import DEFAULT_CONDENSE_PROMPT_TEMPLATE
from llama_index.core.prompts import BasePromptTemplate

from mac_rag.errors import MACError
from mac_rag.lm.prompt import FittedPrompt

# The one prompt that LlamaIndex hands to an LLM as a finished text, in the chat modes condense_plus_context and best.
_REWRITING = re.compile(
    re.escape(DEFAULT_CONDENSE_PROMPT_TEMPLATE)
    .replace(re.escape("{chat_history}"), ".*")
    .replace(re.escape("{question}"), "(?P<question>.*?)"),
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `predict` or `stream`.

    Attributes:
        question: to be answered.
        contexts: texts to read it with, or a prompt that is fitted already; None where the template has no such slot.
        settled: the reply where nothing is to be asked.
    """

    question: str
    contexts: tuple[str, ...] | FittedPrompt | None = None
    settled: str | None = None


def read_slots(prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request:
    """Reads a request from the slots that LlamaIndex's synthesizers and chat engines fill.

    - `query_str` is the question; `context_str` (a text, or a list of texts in simple_summarize) or, in the later
      steps of refine, `context_msg` is the context. The template's own words are not used: the LM reads question and
      context in the format it was trained with.
    - A later step of refine brings an `existing_answer`, and that answer stands. The nodes come best first, and a MAC
      model answers in a few tokens without ever saying that a context does not help: asked again, the answer from the
      last and worst node would win. Whoever asks this way is warned that the further context is not read.
    - The rewriting step of condense_question (`question`, `chat_history`) gives the question back as it is, since a
      model that answers in a few tokens cannot rewrite one.

    Raises:
        MACError: when there is no question among the slots, or the template asks for structured output.
    """
    if prompt.output_parser is not None:
        raise MACError("MACLLM answers in plain text and supports no output parser; take it off the prompt template")
    values = {**prompt.kwargs, **prompt_args}
    question = values.get("query_str")
    if question is None and "chat_history" in values and isinstance(values.get("question"), str):
        return Request(values["question"], settled=values["question"])
    if not isinstance(question, str):
        raise MACError(
            f"MACLLM answers questions, and this prompt template has no text in a slot named query_str "
            f"(its slots: {', '.join(sorted(values)) or 'none'})"
        )
    existing = values.get("existing_answer")
    if existing:
        warnings.warn(
            "a later step of refine keeps the answer to the first context and does not read the further ones; "
            "use response_mode='compact' without a prompt helper to have all nodes read in one prompt",
            stacklevel=4,
        )
        return Request(question, settled=str(existing))
    context = values.get("context_msg", values.get("context_str"))
    if context is None or isinstance(context, FittedPrompt):
        return Request(question, context)
    texts = [context] if isinstance(context, str) else [str(text) for text in context]
    return Request(question, tuple(text for text in texts if text.strip()))


def rewritten_question(prompt: str) -> str | None:
    """The follow-up question in LlamaIndex's own prompt to rewrite one, as it is; None for any other text."""
    found = _REWRITING.fullmatch(prompt)
    return None if found is None else found["question"]
