"""What a checkpoint that follows no instructions refuses, and which wording of prompts and chats it serves."""

from __future__ import annotations

import asyncio
import importlib
import logging
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Document, KeywordTableIndex, PromptTemplate, Settings, TreeIndex, VectorStoreIndex
from llama_index.core.agent.workflow import CodeActAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.evaluation import CorrectnessEvaluator, FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.extractors import TitleExtractor
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.memory import FactExtractionMemoryBlock
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.postprocessor.pii import PIINodePostprocessor
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptType, RichPromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RouterQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from pydantic import BaseModel

from mac_rag.data.types import Document as MACDocument
from mac_rag.errors import InstructionError, MACError
from mac_rag.integrations.framework import check_question
from mac_rag.integrations.llama_index import MACLLM
from mac_rag.integrations.llama_index.instructions import FRAMEWORK, check_template
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, QUESTION, HashEmbedding, RecordingEngine, scored


class Person(BaseModel):
    name: str


def tools(index: VectorStoreIndex, llm: MACLLM) -> list[QueryEngineTool]:
    return [QueryEngineTool.from_defaults(index.as_query_engine(llm=llm), name="facts", description="Facts.")]


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


Case = Callable[[VectorStoreIndex, MACLLM], Any]


def fusion(index: VectorStoreIndex, llm: MACLLM, **options: Any) -> QueryFusionRetriever:
    return QueryFusionRetriever([index.as_retriever()], llm=llm, num_queries=3, **options)


def router(index: VectorStoreIndex, llm: MACLLM) -> RouterQueryEngine:
    return RouterQueryEngine.from_defaults(tools(index, llm), llm=llm, selector=LLMSingleSelector.from_defaults(llm))


def program(llm: MACLLM) -> LLMTextCompletionProgram[Person]:
    return LLMTextCompletionProgram.from_defaults(output_cls=Person, prompt_template_str="Name {who}.", llm=llm)


def second_turn(index: VectorStoreIndex, llm: MACLLM, mode: str, streaming: bool = False) -> Any:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=1)  # type: ignore[arg-type]
    chat.chat(QUESTION)
    return list(chat.stream_chat("And when?").response_gen) if streaming else chat.chat("And when?")


async def second_turn_async(index: VectorStoreIndex, llm: MACLLM, mode: str) -> Any:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=1)  # type: ignore[arg-type]
    await chat.achat(QUESTION)
    return await chat.achat("And when?")


async def agent(made: Any) -> Any:
    return await made.run("What is twice 21?")


async def remember(llm: MACLLM) -> None:
    await FactExtractionMemoryBlock(name="facts", llm=llm).aput([ChatMessage(role="user", content="I live in Sola.")])


JUDGED = {"query": QUESTION, "response": "Anna Berg", "contexts": [FACTS["bridge"]], "reference": "Anna Berg"}
EVALUATORS = [FaithfulnessEvaluator, RelevancyEvaluator, CorrectnessEvaluator]
NEEDS_INSTRUCTIONS: dict[str, Case] = {
    "HyDE": lambda index, llm: HyDEQueryTransform(llm=llm).run(QUESTION),
    "router": lambda index, llm: router(index, llm).query(QUESTION),
    "router, async": lambda index, llm: asyncio.run(router(index, llm).aquery(QUESTION)),
    "citations": lambda index, llm: CitationQueryEngine.from_args(index, llm=llm).query(QUESTION),
    "LLMRerank": lambda index, llm: LLMRerank(llm=llm).postprocess_nodes(scored(*FACTS), query_str=QUESTION),
    "RankGPT": lambda index, llm: RankGPTRerank(llm=llm).postprocess_nodes(scored(*FACTS), query_str=QUESTION),
    "PII": lambda index, llm: PIINodePostprocessor(llm=llm).postprocess_nodes(scored(*FACTS)),
    "fusion": lambda index, llm: fusion(index, llm, use_async=False).retrieve(QUESTION),
    "fusion, async": lambda index, llm: asyncio.run(fusion(index, llm).aretrieve(QUESTION)),
    **{each.__name__: lambda index, llm, each=each: each(llm=llm).evaluate(**JUDGED) for each in EVALUATORS},
    "TitleExtractor": lambda index, llm: TitleExtractor(llm=llm).extract([TextNode(text=FACTS["bridge"])]),
    "program": lambda index, llm: program(llm)(who="the engineer"),
    "program, streaming": lambda index, llm: list(program(llm).stream_call(who="the engineer")),
    "ReActAgent": lambda index, llm: asyncio.run(agent(ReActAgent(tools=[double], llm=llm))),
    "CodeActAgent": lambda index, llm: asyncio.run(
        agent(CodeActAgent(code_execute_fn=lambda code: code, tools=[double], llm=llm))
    ),
    "condense_question": lambda index, llm: second_turn(index, llm, "condense_question"),
    "condense_plus_context": lambda index, llm: second_turn(index, llm, "condense_plus_context"),
    "condense_plus_context, streaming": lambda index, llm: second_turn(index, llm, "condense_plus_context", True),
    "condense_plus_context, async": lambda index, llm: asyncio.run(
        second_turn_async(index, llm, "condense_plus_context")
    ),
    "system prompt, simple": lambda index, llm: index.as_chat_engine(
        chat_mode="simple", llm=llm, system_prompt="Answer in French."
    ).chat(QUESTION),
    "system prompt, context": lambda index, llm: index.as_chat_engine(
        chat_mode="context", llm=llm, system_prompt="Answer in French."
    ).chat(QUESTION),
    "memory of facts": lambda index, llm: asyncio.run(remember(llm)),
    "TreeIndex": lambda index, llm: TreeIndex.from_documents([Document(text="A fact.")] * 3, num_children=2, llm=llm),
    "KeywordTableIndex": lambda index, llm: KeywordTableIndex.from_documents([Document(text="A fact.")], llm=llm),
}


@pytest.fixture(scope="module")
def refusing(loaded_tiny_model: MACModel) -> MACLLM:
    """An LLM that is asked for nothing but what it refuses."""
    engine = RecordingEngine(loaded_tiny_model)
    engine.adapt(MACDocument(name, text) for name, text in FACTS.items())
    return MACLLM(engine=engine)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:inspect", "ignore::DeprecationWarning:llama_index")
@pytest.mark.parametrize("name", NEEDS_INSTRUCTIONS)
def test_a_component_that_needs_another_llm_says_so(
    index: VectorStoreIndex, refusing: MACLLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Settings, "_llm", refusing)  # some components resolve it, whatever they are given
    monkeypatch.setattr(Settings, "_embed_model", HashEmbedding())
    with pytest.raises(InstructionError, match=r"llm=\.\.\..*prompt format is chat"):
        NEEDS_INSTRUCTIONS[name](index, refusing)


def test_no_refusal_costs_an_answer(index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine) -> None:
    with pytest.raises(InstructionError):
        NEEDS_INSTRUCTIONS["ReActAgent"](index, llm)
    with pytest.raises(InstructionError):
        NEEDS_INSTRUCTIONS["FaithfulnessEvaluator"](index, llm)
    assert engine.asked == []


def test_errors_are_of_no_class_that_llama_index_swallows() -> None:
    assert MACError.__bases__ == (Exception,)
    for special in (RuntimeError, ValueError, TypeError, OSError, LookupError, NotImplementedError):
        assert not issubclass(InstructionError, special)


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


def test_results_of_tools_are_refused(llm: MACLLM) -> None:
    chat = [ChatMessage(role="user", content=QUESTION), ChatMessage(role="tool", content="42")]
    with pytest.raises(InstructionError, match="result of a tool"):
        llm.chat(chat)
