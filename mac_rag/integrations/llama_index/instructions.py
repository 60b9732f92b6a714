"""Reads requests from LlamaIndex's prompt templates and conversations; refuses those that a checkpoint cannot serve.

The slots, the declared type and the wording of a prompt template tell what its component asks for;
`mac_rag.integrations.framework` explains why some requests are refused.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.chat_engine import condense_plus_context, context
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate, PromptType
from llama_index.core.prompts.base import ChatPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.utils import get_template_vars

from mac_rag.errors import InstructionError, MACError
from mac_rag.integrations.framework import (
    Framework,
    PlainMessage,
    first_time,
    refuse,
    refuse_system_message,
    warn_of_history,
)
from mac_rag.lm.prompt import FittedPrompt

logger = logging.getLogger(__name__)

_CONTEXT_SLOTS = {"context_str", "context_msg"}
_SLOTS = {"query_str", "existing_answer", *_CONTEXT_SLOTS}

# The types that LlamaIndex declares for templates other than those of question answering. `SUMMARY` is the type of
# tree_summarize, which is question answering.
_OTHER_TYPES = set(PromptType) - {
    PromptType.CUSTOM,
    PromptType.QUESTION_ANSWER,
    PromptType.REFINE,
    PromptType.SIMPLE_INPUT,
    PromptType.SUMMARY,
}

# Wording by which a template with the slots of question answering asks for something else. Evaluators, rerankers and
# question generators declare no type of their own, so only their wording distinguishes them from a custom template. A
# custom template may well mention questions, scores or JSON; only a demand for them matches.
_DEMANDS = re.compile(
    r"""
      \bYES\b .{0,300}? \bNO\b                                                                    # a verdict
    | (?i: \b(?:yes|true|pass)\b ["'\W]{0,3} (?:or|/) ["'\W]{0,3} \b(?:no|false|fail)\b )
    | (?i: \b(?:answer|respond|return|say) ) \s+ (?: with \s+ )? ["']? [A-Z]{3,} \b ["']? \s* (?: , | / | or\b )
    | (?i: \b(?:answer|format|give|provide|reply|respond|return|write)\b [^.]{0,80}?                # a notation
           (?<!\bis\s) (?<!\bare\s) \b(?:in|as|valid) \s+ (?: an?\s+ | valid\s+ )? (?:json|xml|yaml)\b )
    | (?i: \b(?:answer|follow|following|give|provide|reply|respond|return|use|write)\b [^.]{0,80}?
           \b(?:this|following|exact) \s+ format\b )
    | (?i: \b(?:evaluation|relevance) \s+ scores?\b | \bon\ a\ scale\ (?:of|from)\b )               # a grade
    | (?i: \bnumbers? \s+ of \s+ the \s+ (?:documents?|passages?|choices?)\b )                     # a choice
    | (?i: \bcite\b [^.]{0,80} \bnumbers?\b )
    | (?i: (?<!\bhow\ to\ ) \b(?:create|extract|generate|produce|return|write)\b                  # other texts
           (?: \W+ (?! (?:answer|reply|response) s? \b ) \w+ ){0,4}?
           \W+ (?:entities|keywords|new\ question|queries|questions|summar(?:y|ies)|titles?|triplets)\b )
    """,
    re.VERBOSE | re.DOTALL,
)

# The chat engines append the user's system prompt to one of these.
_CONTEXT_TEMPLATES = (
    context.DEFAULT_CONTEXT_TEMPLATE,
    context.DEFAULT_REFINE_TEMPLATE,
    condense_plus_context.DEFAULT_CONTEXT_PROMPT_TEMPLATE,
    condense_plus_context.DEFAULT_CONTEXT_REFINE_PROMPT_TEMPLATE,
)


FRAMEWORK = Framework(
    llm="MACLLM",
    options="contexts, max_tokens (at least 1), temperature, top_p, seed and stop",
    other_llm="Give the component that asks another LLM (llm=...)",
    prompt_remedy="; to ask about texts, pass them: complete(question, contexts=[...]). Without another LLM, a chat "
    "engine takes skip_condense=True or chat_mode='context', and a QueryFusionRetriever num_queries=1",
    system_remedy="; or leave the system prompt out. Agents always have one",
    tool_remedy=", so use an agent that calls tools by text (ReActAgent)",
)


@dataclass(frozen=True, slots=True)
class _Wording:
    """The wording of a prompt template, without the messages of an earlier conversation.

    Attributes:
        slots: names of its slots, by the names that LlamaIndex's components use.
        system: the texts of its system messages.
    """

    slots: frozenset[str]
    text: str
    system: tuple[str, ...] = ()
    has_history: bool = False


def check_template(prompt: BasePromptTemplate, llm: LLM) -> None:
    """Checks that a prompt template asks for the answer to a question; warns once if it has a wording of its own.

    Raises:
        InstructionError: for a template that asks for anything else; names the part that shows it.
    """
    if isinstance(prompt, SelectorPromptTemplate):
        prompt = prompt.select(llm=llm)
    wording = _wording(prompt, llm)
    slots = wording.slots
    if {"chat_history", "question"} <= slots:
        refuse(
            "it asks to rewrite a follow-up question of a chat (slots chat_history, question)",
            FRAMEWORK,
            "; or let the chat engine ask each question as it is typed: chat_mode='context', or "
            "chat_mode='condense_plus_context' with skip_condense=True",
        )
    kind = prompt.metadata.get("prompt_type") or PromptType.CUSTOM
    if kind in _OTHER_TYPES:
        refuse(f"its prompt template is made for {PromptType(kind).value!r}, not for answering a question", FRAMEWORK)
    if "query_str" not in slots:
        named = ", ".join(sorted(slots)) or "none"
        refuse(f"its prompt template has no slot query_str for a question (its slots: {named})", FRAMEWORK)
    if unknown := sorted(slots - _SLOTS):
        refuse(
            f"its prompt template has slots that hold neither question nor context: {', '.join(unknown)}",
            FRAMEWORK,
            "; or take these slots out of the template",
        )
    if "existing_answer" in slots and not slots & _CONTEXT_SLOTS:
        refuse("its prompt template continues an existing answer without a new context", FRAMEWORK)
    if demand := _DEMANDS.search(wording.text):
        words = " ".join(demand.group().split())
        refuse(
            f"its prompt template asks for more than an answer ({words!r})",
            FRAMEWORK,
            "; or take these words out of the template, whose wording is not read",
        )
    is_own = kind == PromptType.CUSTOM
    for text in wording.system:
        for template in _CONTEXT_TEMPLATES:
            if text.startswith(template):
                is_own = False
                if added := text.removeprefix(template).strip():
                    refuse_system_message(added, FRAMEWORK)
    if is_own and first_time("wording"):
        logger.warning(
            "the checkpoint reads question and context in the format of its training, and not the wording of your "
            "prompt template (shown once)"
        )
    if wording.has_history:
        warn_of_history()


def _wording(prompt: BasePromptTemplate, llm: LLM) -> _Wording:
    if not isinstance(prompt, ChatPromptTemplate):
        return _Wording(_slots(prompt, prompt.template_vars), prompt.get_template(llm=llm))
    # Messages before the question are an earlier conversation; braces in them are not slots.
    messages = prompt.message_templates
    system = tuple(message.content or "" for message in messages if _is_system(message))
    users = [message.content or "" for message in messages if message.role == MessageRole.USER]
    text = "\n".join([*system, *users[-1:]])
    names = [*get_template_vars(text), *(_SLOTS & set(prompt.template_vars))]
    return _Wording(_slots(prompt, names), text, system, len(messages) > len(system) + 1)


def _slots(prompt: BasePromptTemplate, names: Sequence[str]) -> frozenset[str]:
    renamed = {str(there): here for here, there in (prompt.template_var_mappings or {}).items()}
    return frozenset(renamed.get(name, name) for name in names)


def _is_system(message: ChatMessage) -> bool:
    return message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER)


# Reads question and context from the slots of a LlamaIndex prompt template, never from its text.


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the LLM.

    Attributes:
        question: the question to answer.
        contexts: texts to answer from, or a `FittedPrompt` with them; None if the template has no slot for contexts.
        messages: the conversation that asks the question, whose wording the LM reads; None if the LM reads question and
            contexts only.
        settled: the answer, if it is known without the model; None if the model has to answer.
    """

    question: str
    contexts: tuple[str, ...] | FittedPrompt | None = None
    settled: str | None = None
    messages: tuple[ChatMessage, ...] | None = None


def read_slots(prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request:
    """Reads a request from the slots that LlamaIndex's synthesizers and chat engines fill.

    - `query_str` is the question. The context is `context_str` (a text, or a list of texts in simple_summarize) or, in
      later steps of refine, `context_msg`. The words of the template are ignored: the LM reads question and context in
      the format of its training.
    - A later step of refine has an `existing_answer`, which is returned. Nodes come best first, and a MAC model answers
      in a few tokens without saying that a context does not help, so the last answer would be the one from the worst
      node. A warning says that further contexts are not read.

    Args:
        prompt: the template.
        prompt_args: values of its slots.

    Raises:
        InstructionError: if the template asks for structured output.
        MACError: if no slot holds a question.
    """
    if prompt.output_parser is not None:
        raise InstructionError(
            "MACLLM answers in plain text and supports no output parser; remove it from the prompt template, or give "
            "this step another LLM (llm=...)"
        )
    values = {**prompt.kwargs, **prompt_args}
    question = values.get("query_str")
    if not isinstance(question, str):
        raise MACError(
            f"MACLLM answers questions, and this prompt template has no text in the slot query_str "
            f"(its slots: {', '.join(sorted(values)) or 'none'}); put the question there"
        )
    existing = values.get("existing_answer")
    if existing:
        if first_time("refine"):
            warnings.warn(
                "a later step of refine keeps the answer to the first context and does not read the others; use "
                "response_mode='compact' without a prompt helper to have all nodes read in one prompt (shown once)",
                stacklevel=4,
            )
        return Request(question, settled=str(existing))
    context = values.get("context_msg", values.get("context_str"))
    if context is None or isinstance(context, FittedPrompt):
        return Request(question, context)
    texts = [context] if isinstance(context, str) else [str(text) for text in context]
    return Request(question, tuple(text for text in texts if text.strip()))


_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
_QUESTION_SLOTS = ("query_str", "question", "query")  # the names that LlamaIndex's components use
_CONTEXTS = ("context_msg", "context_str")
_IN_MEMORY = "(the context above)"  # in a template, in place of documents that the LM reads from the bank


def plain_messages(messages: Sequence[ChatMessage]) -> list[PlainMessage]:
    """The messages in the form that both frameworks share."""
    return [
        PlainMessage(
            _ROLES.get(message.role, message.role.value),
            message.content or "",
            tuple(block.block_type for block in message.blocks if not isinstance(block, TextBlock)),
        )
        for message in messages
    ]


@dataclass(frozen=True)
class FilledTemplate:
    """A prompt template with its wording, for an LM that reads it.

    Attributes:
        question: the question in the slots, which queries the memory; empty for the last message.
        texts: the contexts in the slots.
        fill: the messages with these contexts, or with some of them.
    """

    question: str
    texts: tuple[str, ...]
    fill: Callable[[Sequence[str]], Sequence[ChatMessage]]


def read_template(llm: LLM, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> FilledTemplate | None:
    """A prompt template with its values; None for one that is nothing but slots, and for a `FittedPrompt` in a slot."""
    values = {**prompt.kwargs, **prompt_args}
    if _is_slots(llm, prompt) or any(isinstance(value, FittedPrompt) for value in values.values()):
        return None
    questions = [values[name] for name in _QUESTION_SLOTS if isinstance(values.get(name), str)]
    slot = next((name for name in _CONTEXTS if name in values), None)
    context = () if slot is None else values[slot]
    given = [context] if isinstance(context, str) else [str(text) for text in context]
    texts = tuple(text for text in given if text.strip())

    def fill(some: Sequence[str]) -> Sequence[ChatMessage]:
        left = {} if slot is None or tuple(some) == texts else {slot: "\n\n".join([_IN_MEMORY, *some])}
        messages: Sequence[ChatMessage] = llm._get_messages(prompt, **{**prompt_args, **left})
        return messages

    return FilledTemplate(next(iter(questions), ""), texts, fill)


def _is_slots(llm: LLM, prompt: BasePromptTemplate) -> bool:
    """True for a template without any wording, to which no output parser adds some."""
    wording: str = prompt.get_template(llm=llm)
    parses = prompt.output_parser is not None or llm.output_parser is not None
    return not parses and "query_str" in prompt.template_vars and not re.sub(r"\{\w+\}", "", wording).strip()
