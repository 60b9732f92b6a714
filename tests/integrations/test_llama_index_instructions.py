"""Components of LlamaIndex that need an LM which follows instructions say so; nothing else is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Document, KeywordTableIndex, Settings, TreeIndex, VectorStoreIndex
from llama_index.core.agent.workflow import CodeActAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.evaluation import (
    AnswerRelevancyEvaluator,
    ContextRelevancyEvaluator,
    CorrectnessEvaluator,
    FaithfulnessEvaluator,
    GuidelineEvaluator,
    PairwiseComparisonEvaluator,
    RelevancyEvaluator,
)
from llama_index.core.extractors import (
    KeywordExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.memory import FactExtractionMemoryBlock
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.postprocessor.node import AutoPrevNextNodePostprocessor
from llama_index.core.postprocessor.pii import PIINodePostprocessor
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.query_engine import (
    CitationQueryEngine,
    FLAREInstructQueryEngine,
    MultiStepQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from pydantic import BaseModel

from mac_rag.data.types import Document as MACDocument
from mac_rag.errors import InstructionError, MACError
from mac_rag.integrations.llama_index import MACLLM
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


def sub_questions(index: VectorStoreIndex, llm: MACLLM) -> SubQuestionQueryEngine:
    generator = LLMQuestionGenerator.from_defaults(llm=llm)
    return SubQuestionQueryEngine.from_defaults(tools(index, llm), question_gen=generator, llm=llm, use_async=False)


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


JUDGED = {
    "query": QUESTION,
    "response": "Anna Berg",
    "contexts": [FACTS["bridge"]],
    "reference": "Anna Berg",
    "second_response": "Peter Holm",
}
EVALUATORS = [
    FaithfulnessEvaluator,
    RelevancyEvaluator,
    ContextRelevancyEvaluator,
    AnswerRelevancyEvaluator,
    CorrectnessEvaluator,
    GuidelineEvaluator,
    PairwiseComparisonEvaluator,
]
EXTRACTORS = [TitleExtractor, KeywordExtractor, QuestionsAnsweredExtractor, SummaryExtractor]

NEEDS_INSTRUCTIONS: dict[str, Case] = {
    "HyDE": lambda index, llm: HyDEQueryTransform(llm=llm).run(QUESTION),
    "router": lambda index, llm: router(index, llm).query(QUESTION),
    "router, async": lambda index, llm: asyncio.run(router(index, llm).aquery(QUESTION)),
    "sub-questions": lambda index, llm: sub_questions(index, llm).query(QUESTION),
    "multi-step": lambda index, llm: MultiStepQueryEngine(
        index.as_query_engine(llm=llm), StepDecomposeQueryTransform(llm=llm)
    ).query(QUESTION),
    "citations": lambda index, llm: CitationQueryEngine.from_args(index, llm=llm).query(QUESTION),
    "FLARE": lambda index, llm: FLAREInstructQueryEngine(index.as_query_engine(llm=llm), llm=llm).query(QUESTION),
    "retry": lambda index, llm: RetryQueryEngine(index.as_query_engine(llm=llm), RelevancyEvaluator(llm=llm)).query(
        QUESTION
    ),
    "LLMRerank": lambda index, llm: LLMRerank(llm=llm).postprocess_nodes(scored(*FACTS), query_str=QUESTION),
    "RankGPT": lambda index, llm: RankGPTRerank(llm=llm).postprocess_nodes(scored(*FACTS), query_str=QUESTION),
    "previous or next": lambda index, llm: AutoPrevNextNodePostprocessor(
        docstore=index.docstore, llm=llm
    ).postprocess_nodes(scored(*FACTS), query_str=QUESTION),
    "PII": lambda index, llm: PIINodePostprocessor(llm=llm).postprocess_nodes(scored(*FACTS)),
    "fusion": lambda index, llm: fusion(index, llm, use_async=False).retrieve(QUESTION),
    "fusion, async": lambda index, llm: asyncio.run(fusion(index, llm).aretrieve(QUESTION)),
    **{each.__name__: lambda index, llm, each=each: each(llm=llm).evaluate(**JUDGED) for each in EVALUATORS},
    **{
        each.__name__: lambda index, llm, each=each: each(llm=llm).extract([TextNode(text=FACTS["bridge"])])
        for each in EXTRACTORS
    },
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
