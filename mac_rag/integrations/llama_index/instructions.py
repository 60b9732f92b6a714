"""Which requests of LlamaIndex's components a checkpoint can serve that reads question and context only.

Such a checkpoint follows no instructions. Asked to choose, judge, extract or rewrite, it would answer some question
from memory, and LlamaIndex would take that for a choice, a verdict or a new question. So these requests are refused.
What a component asks for shows in the slots, the declared type and the wording of its prompt template.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.chat_engine import condense_plus_context, context
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate, PromptType
from llama_index.core.prompts.base import ChatPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.utils import get_template_vars

from mac_rag.errors import InstructionError, MACError
from mac_rag.integrations.llama_index.once import first_time

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

_LABEL = re.compile(r"\s*[^\s:][^\n:]{0,40}:(?:\s|$)")

# The chat engines put a system prompt of the user behind one of these.
_CONTEXT_TEMPLATES = (
    context.DEFAULT_CONTEXT_TEMPLATE,
    context.DEFAULT_REFINE_TEMPLATE,
    condense_plus_context.DEFAULT_CONTEXT_PROMPT_TEMPLATE,
    condense_plus_context.DEFAULT_CONTEXT_REFINE_PROMPT_TEMPLATE,
)


def refuse(reason: str, remedy: str = "") -> NoReturn:
    """Raises the error for a request that only an LM which follows instructions can serve.

    Args:
        reason: what the request asks for; it ends the sentence "MACLLM cannot serve this request: ...".
        remedy: a remedy of this request beside the general one.
    """
    raise InstructionError(
        f"MACLLM cannot serve this request: {reason}. The checkpoint reads a question and its context, and follows no "
        "instructions. Give the component that asks another LLM (llm=...), one that follows instructions, or give "
        f"MACLLM a checkpoint whose prompt format is chat{remedy}"
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
            "; or let the chat engine ask each question as it is typed: chat_mode='context', or "
            "chat_mode='condense_plus_context' with skip_condense=True",
        )
    kind = prompt.metadata.get("prompt_type") or PromptType.CUSTOM
    if kind in _OTHER_TYPES:
        refuse(f"its prompt template is made for {PromptType(kind).value!r}, not for answering a question")
    if "query_str" not in slots:
        named = ", ".join(sorted(slots)) or "none"
        refuse(f"its prompt template has no slot query_str for a question (its slots: {named})")
    if unknown := sorted(slots - _SLOTS):
        refuse(
            f"its prompt template has slots that hold neither question nor context: {', '.join(unknown)}",
            "; or take these slots out of the template",
        )
    if "existing_answer" in slots and not slots & _CONTEXT_SLOTS:
        refuse("its prompt template continues an existing answer without a new context")
    if demand := _DEMANDS.search(wording.text):
        words = " ".join(demand.group().split())
        refuse(
            f"its prompt template asks for more than an answer ({words!r})",
            "; or take these words out of the template, whose wording is not read",
        )
    is_own = kind == PromptType.CUSTOM
    for text in wording.system:
        for template in _CONTEXT_TEMPLATES:
            if text.startswith(template):
                is_own = False
                if added := text.removeprefix(template).strip():
                    _refuse_system_message(added)
    if is_own and first_time("wording"):
        logger.warning(
            "the checkpoint reads question and context in the form that it was trained on, and not the wording of your "
            "prompt template (this is said once)"
        )
    if wording.has_history:
        _warn_of_history()


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


def check_question(text: str) -> None:
    """Checks that a text handed over as a whole is a question, and not a prompt to complete.

    A prompt has several paragraphs, lines that begin with a label ("Query: ..."), or an open label at its end
    ("Answer:"). A question has none of these, though it may have several lines.

    Raises:
        InstructionError: for a prompt.
    """
    body = text.strip()
    lines = body.splitlines()
    if body.endswith(":") or "" in (line.strip() for line in lines) or any(_LABEL.match(line) for line in lines[1:]):
        refuse(
            f"it is a prompt to complete, not a question ({_beginning(body)!r})",
            "; to ask about texts, hand them over: complete(question, contexts=[...]). Without another LLM, a "
            "chat engine takes skip_condense=True or chat_mode='context', and a QueryFusionRetriever num_queries=1",
        )


def last_question(messages: Sequence[ChatMessage]) -> str:
    """The last user message, which is the question; warns once if there is an earlier conversation.

    Raises:
        InstructionError: for system messages, calls of tools, or a prompt in place of a question.
        MACError: when there is no user message, or it holds more than text.
    """
    for message in messages:
        if _is_system(message) and (message.content or "").strip():
            _refuse_system_message(message.content or "")
        if message.role in (MessageRole.TOOL, MessageRole.FUNCTION):
            refuse("the chat holds the result of a tool")
    users = [message for message in messages if message.role == MessageRole.USER]
    if not users:
        raise MACError("MACLLM answers the last user message, and there is none among the messages")
    others = [block.block_type for block in users[-1].blocks if not isinstance(block, TextBlock)]
    if others:
        raise MACError(f"MACLLM reads text only, but the last user message holds: {', '.join(others)}")
    question = users[-1].content or ""
    check_question(question)
    if len(messages) > 1:
        _warn_of_history()
    return question


def _is_system(message: ChatMessage) -> bool:
    return message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER)


def _refuse_system_message(text: str) -> NoReturn:
    refuse(
        f"the chat has a system message or system prompt ({_beginning(text)!r})",
        "; or leave the system prompt out. Agents always have one",
    )


def _warn_of_history() -> None:
    if first_time("history"):
        logger.warning(
            "the checkpoint does not read the earlier messages of a chat: each question has to be complete by itself "
            "(this is said once)"
        )


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
