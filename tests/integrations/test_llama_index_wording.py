"""Which wording of templates, questions and chats a checkpoint serves that follows no instructions."""

from __future__ import annotations

import asyncio
import importlib
import logging
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

import llama_index.core
import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptType, RichPromptTemplate

from mac_rag.errors import InstructionError
from mac_rag.integrations.framework import check_question
from mac_rag.integrations.llama_index import MACLLM
from mac_rag.integrations.llama_index.instructions import FRAMEWORK, check_template
from tests.integrations.helpers import FACTS, QUESTION, RecordingEngine

SERVED = {
    "plain": PromptTemplate("Context: {context_str}\nQuestion: {query_str}\nAnswer:"),
    "another language": PromptTemplate("Nutze diesen Text:\n{context_str}\nBeantworte: {query_str}"),
    "no words": PromptTemplate("{context_str}\n\n{query_str}"),
    "advice": PromptTemplate(
        "You answer questions about our database, which knows SQL and JSON. Use {context_str} only. Keep the answer "
        "short and say that you do not know if the text does not answer {query_str}. Yes, no guessing. THANK YOU."
    ),
    **{
        f"custom {number}": PromptTemplate(text + "\n{context_str}\n{query_str}")
        for number, text in enumerate(
            [
                "You are given a list of passages and a question. Return the best answer.",
                "Generate accurate answers to user questions from our summaries.",
                "You answer questions about matches and their final scores, on NASA, and on how to write queries.",
                "The context is in the following format: title, then text. It is in JSON.",
                "Answer from the context, which is in XML. Do not cite sources. Do not rephrase.",
                "If the documents do not answer the question, say NOTHING FOUND. Think of relevance.",
            ]
        )
    },
    "renamed": PromptTemplate(
        "{my_text} {my_question}", template_var_mappings={"context_str": "my_text", "query_str": "my_question"}
    ),
    "function": PromptTemplate(
        "{context_str} {query_str}", function_mappings={"context_str": lambda **values: values["context_str"].upper()}
    ),
    "typed": PromptTemplate("{context_str} {query_str}", prompt_type=PromptType.QUESTION_ANSWER),
    "chat": ChatPromptTemplate(
        [
            ChatMessage(role="system", content="You are a helpful assistant."),
            ChatMessage(role="user", content="{context_str}\n{query_str}"),
        ]
    ),
    "a type of one's own": PromptTemplate("{context_str} {query_str}", prompt_type="support"),
    "begun answer": ChatPromptTemplate(
        [
            ChatMessage(role="user", content="{context_str}"),
            ChatMessage(role="user", content="{query_str}"),
            ChatMessage(role="assistant", content="The answer is"),
        ]
    ),
    "rich": RichPromptTemplate("{{ context_str }}\n{{ query_str }}"),
}


@pytest.mark.parametrize("name", SERVED)
def test_templates_of_ones_own_are_served(
    index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queries = index.as_query_engine(llm=llm, similarity_top_k=1, text_qa_template=SERVED[name])
    with caplog.at_level(logging.WARNING):
        answers = {str(queries.query(QUESTION)), str(asyncio.run(queries.aquery(QUESTION)))}
    assert answers == {str(index.as_query_engine(llm=llm, similarity_top_k=1).query(QUESTION))}
    assert engine.asked == [(QUESTION, (FACTS["bridge"],))] * 3
    said = caplog.text.count("not the wording of your prompt template")
    assert said == (0 if "type" in name else 1)


REFUSED = {
    "verdict": "Does {context_str} answer {query_str}? Answer yes or no.",
    "notation": "From {context_str} answer {query_str} as JSON.",
    "format": "{context_str} {query_str} Use the following format: Answer: <answer>",
    "score": "Give a relevance score of {context_str} for {query_str}.",
    "choice": "{context_str} Name the numbers of the documents that answer {query_str}.",
    "code word": "Does {context_str} answer {query_str}? Return FOUND or MISSING.",
    "generation": "From {context_str}, generate three questions like {query_str}.",
    "slot": "{context_str} {query_str} {tone}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_asking_for_more_than_an_answer_are_refused(index: VectorStoreIndex, llm: MACLLM, name: str) -> None:
    template = PromptTemplate(REFUSED[name])
    with pytest.raises(InstructionError, match="out of the template"):
        index.as_query_engine(llm=llm, text_qa_template=template).query(QUESTION)


def templates_of_llama_index() -> Iterator[tuple[str, BasePromptTemplate]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in pkgutil.walk_packages(llama_index.core.__path__, "llama_index.core."):
            try:
                module = importlib.import_module(found.name)
            except ImportError:  # needs a package that is not installed
                continue
            for name, value in vars(module).items():
                if isinstance(value, str) and name.isupper() and "{" in value:
                    value = PromptTemplate(value)
                if isinstance(value, BasePromptTemplate):
                    yield f"{found.name}.{name}".removeprefix("llama_index.core."), value


def test_of_llama_indexs_own_templates_only_those_of_question_answering_are_served(llm: MACLLM) -> None:
    served, refused = set(), set()
    for name, template in templates_of_llama_index():
        try:
            check_template(template, llm)
            served.add(name.rpartition(".")[2])
        except InstructionError:
            refused.add(name)
    assert served == {
        "DEFAULT_SIMPLE_INPUT_PROMPT",
        "DEFAULT_SIMPLE_INPUT_TMPL",
        "DEFAULT_TEXT_QA_PROMPT",
        "DEFAULT_TEXT_QA_PROMPT_SEL",
        "DEFAULT_TEXT_QA_PROMPT_TMPL",
        "DEFAULT_TREE_SUMMARIZE_PROMPT",
        "DEFAULT_TREE_SUMMARIZE_PROMPT_SEL",
        "DEFAULT_TREE_SUMMARIZE_TMPL",
        "DEFAULT_REFINE_PROMPT",
        "DEFAULT_REFINE_PROMPT_SEL",
        "DEFAULT_REFINE_PROMPT_TMPL",
        "CHAT_SIMPLE_INPUT_PROMPT",
        "CHAT_TEXT_QA_PROMPT",
        "CHAT_TREE_SUMMARIZE_PROMPT",
        "CHAT_REFINE_PROMPT",
    }
    assert len(refused) > 80


@pytest.mark.parametrize(
    "question",
    [
        "Who opened the bridge?",
        "Who opened the bridge: Anna Berg or Peter Holm?",
        "What does JSON stand for?",
        "Who opened\nthe bridge of Norrland,\nand when?",
        "  Who opened the bridge?\n",
        "Is it true that the ferry crosses the river every hour, yes or no?",
        "",
    ],
)
def test_questions_are_no_prompts(question: str) -> None:
    check_question(question, FRAMEWORK)


@pytest.mark.parametrize(
    "prompt",
    [
        "Answer the question.\n\nWho opened the bridge?",
        "Question: Who opened the bridge?\nAnswer:",
        "Rewrite this question.\nuser: Who opened the bridge?\nassistant: Anna Berg",
        "Write three queries:",
    ],
)
@pytest.mark.parametrize("ask", ["complete", "stream_complete", "chat"])
def test_prompts_to_complete_are_refused(llm: MACLLM, engine: RecordingEngine, prompt: str, ask: str) -> None:
    argument: Any = [ChatMessage(role="user", content=prompt)] if ask == "chat" else prompt
    with pytest.raises(InstructionError, match="prompt to complete"):
        getattr(llm, ask)(argument)
    assert engine.asked == []


def test_slots_and_contexts_make_a_question(index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine) -> None:
    question = "Who opened the bridge?\n\nI mean this one: Norrland"
    llm.complete(question, contexts=[FACTS["bridge"]])
    index.as_query_engine(llm=llm, similarity_top_k=1).query(question)
    index.as_query_engine(llm=llm, response_mode="generation").query(question)
    assert [asked for asked, _ in engine.asked] == [question] * 3


@pytest.mark.parametrize("mode", ["simple", "context", "condense_plus_context"])
def test_chats_go_on_and_say_once_that_each_question_stands_alone(
    index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"skip_condense": True} if mode == "condense_plus_context" else {}
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=1, **options)
    questions = ["What does {braces} mean? Answer YES or NO", QUESTION, "And the ferry?"]
    with caplog.at_level(logging.WARNING):
        for question in questions:
            chat.chat(question)
        asyncio.run(chat.achat(QUESTION))
    assert [question for question, _ in engine.asked] == [*questions, QUESTION]
    assert [record.message for record in caplog.records if "complete by itself" not in record.message] == []
    assert caplog.text.count("complete by itself") == 1


def test_results_of_tools_are_refused(llm: MACLLM) -> None:
    chat = [ChatMessage(role="user", content=QUESTION), ChatMessage(role="tool", content="42")]
    with pytest.raises(InstructionError, match="result of a tool"):
        llm.chat(chat)
