"""What LlamaIndex's prompt templates and conversations ask for, and which of it a checkpoint can serve.

What a component asks for shows in the slots, the declared type and the wording of its prompt template; see
`mac_rag.integrations.framework` for why other requests are refused.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.chat_engine import condense_plus_context, context
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate, PromptType
from llama_index.core.prompts.base import ChatPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.utils import get_template_vars

from mac_rag.errors import InstructionError, MACError
from mac_rag.integrations.framework import Framework, Said, first_time, refuse, refuse_system_message, warn_of_history
from mac_rag.lm.prompt import FittedPrompt

logger = logging.getLogger(__name__)

_CONTEXT_SLOTS = {"context_str", "context_msg"}
_SLOTS = {"query_str", "existing_answer", *_CONTEXT_SLOTS}

# The types that LlamaIndex declares for other templates than those of questions and answers. `SUMMARY` belongs to
# tree_summarize.
_OTHER_TYPES = set(PromptType) - {
    PromptType.CUSTOM,
    PromptType.QUESTION_ANSWER,
    PromptType.REFINE,
    PromptType.SIMPLE_INPUT,
    PromptType.SUMMARY,
}

# Wording by which a template with the slots of question answering asks for something else. Evaluators, rerankers and
# generators of questions declare no type of their own, so their wording is all that tells them from a custom template.
# A custom template may well speak of questions, scores or JSON; only a demand for them is caught.
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

# The chat engines put a system prompt of the user behind one of these.
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
    behind_prompt="; to ask about texts, hand them over: complete(question, contexts=[...]). Without another LLM, a "
    "chat engine takes skip_condense=True or chat_mode='context', and a QueryFusionRetriever num_queries=1",
    behind_system="; or leave the system prompt out. Agents always have one",
    behind_tools=", so use an agent that calls tools by text (ReActAgent)",
)


@dataclass(frozen=True, slots=True)
class _Wording:
    """What a prompt template says.

    Attributes:
        slots: names of its slots, as LlamaIndex's components name them.
        text: its text, without the messages of an earlier conversation.
        system: the texts of its system messages.
        has_history: True if it holds messages of an earlier conversation.
    """

    slots: frozenset[str]
    text: str
    system: tuple[str, ...] = ()
    has_history: bool = False


def check_template(prompt: BasePromptTemplate, llm: LLM) -> None:
    """Checks that a prompt template asks for the answer to a question; warns once if it has a wording of its own.

    Raises:
        InstructionError: for a template that asks for anything else; names what shows it.
    """
    if isinstance(prompt, SelectorPromptTemplate):
        prompt = prompt.select(llm=llm)
    wording = _wording(prompt, llm)
    slots = wording.slots
    if {"chat_history", "question"} <= slots:
        refuse(
            "it is to rewrite a follow-up question of a chat (chat_history, question)",
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
            "the checkpoint reads question and context in the form that it was trained on, and not the wording of your "
            "prompt template (this is said once)"
        )
    if wording.has_history:
        warn_of_history()


def _wording(prompt: BasePromptTemplate, llm: LLM) -> _Wording:
    if not isinstance(prompt, ChatPromptTemplate):
        return _Wording(_slots(prompt, prompt.template_vars), prompt.get_template(llm=llm))
    # Messages of an earlier conversation stand before the question; braces in them are no slots.
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
    """One call of `predict` or `stream`.

    Attributes:
        question: the question to answer.
        contexts: texts to answer from, or a `FittedPrompt`; None if the template has no slot for contexts.
        messages: the conversation that asks the question, whose wording the LM reads; None if the LM reads question and
            contexts only.
        settled: the reply, if it is known without the model; None if the model has to answer.
    """

    question: str
    contexts: tuple[str, ...] | FittedPrompt | None = None
    settled: str | None = None
    messages: tuple[ChatMessage, ...] | None = None


def read_slots(prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request:
    """Reads a request from the slots that LlamaIndex's synthesizers and chat engines fill.

    - `query_str` is the question. The context is `context_str` (a text, or a list of texts in simple_summarize) or, in
      later steps of refine, `context_msg`. The words of the template are ignored: the LM reads question and context in
      the format that it was trained with.
    - A later step of refine has an `existing_answer`, which is returned. Nodes come best first, and a MAC model answers
      in a few tokens without saying that a context does not help, so a new answer would be the one from the worst
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
            "MACLLM answers in plain text and supports no output parser; take it off the prompt template, or give this "
            "step another LLM (llm=...)"
        )
    values = {**prompt.kwargs, **prompt_args}
    question = values.get("query_str")
    if not isinstance(question, str):
        raise MACError(
            f"MACLLM answers questions, and this prompt template has no text in a slot named query_str "
            f"(its slots: {', '.join(sorted(values)) or 'none'})"
        )
    existing = values.get("existing_answer")
    if existing:
        if first_time("refine"):
            warnings.warn(
                "a later step of refine keeps the answer to the first context and does not read the further ones; use "
                "response_mode='compact' without a prompt helper to have all nodes read in one prompt (this is said "
                "once)",
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
_QUESTION_SLOTS = ("query_str", "question", "query")  # as LlamaIndex's components name them
_CONTEXTS = ("context_msg", "context_str")


def said(messages: Sequence[ChatMessage]) -> list[Said]:
    """The messages as texts."""
    return [
        Said(
            _ROLES.get(message.role, message.role.value),
            message.content or "",
            tuple(block.block_type for block in message.blocks if not isinstance(block, TextBlock)),
        )
        for message in messages
    ]


def read_template(llm: LLM, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request | None:
    """A filled prompt template as a conversation with its wording; None for a template that is nothing but slots.

    The memory is asked the question in the slots, or else the last message. A context in the slots may be cut if the
    conversation is beyond the LM's window.
    """
    values = {**prompt.kwargs, **prompt_args}
    if _is_slots(llm, prompt) or any(isinstance(value, FittedPrompt) for value in values.values()):
        return None
    questions = [values[name] for name in _QUESTION_SLOTS if isinstance(values.get(name), str)]
    context = next((values[name] for name in _CONTEXTS if name in values), ())
    texts = [context] if isinstance(context, str) else [str(text) for text in context]
    messages = llm._get_messages(prompt, **prompt_args)
    return Request(next(iter(questions), ""), tuple(text for text in texts if text.strip()), messages=tuple(messages))


def _is_slots(llm: LLM, prompt: BasePromptTemplate) -> bool:
    wording: str = prompt.get_template(llm=llm)
    return "query_str" in prompt.template_vars and not re.sub(r"\{\w+\}", "", wording).strip()
