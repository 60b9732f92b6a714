"""The LM reads the texts of the nodes, and their metadata only where it is asked to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, SimpleDirectoryReader, SummaryIndex, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.schema import MetadataMode
from llama_index_instrumentation import root_dispatcher

from mac_rag.data.types import Document as MACDocument
from mac_rag.engine import MACEngine
from mac_rag.integrations.llama_index import MACLLM, MACSynthesizer
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, QUESTION, HashEmbedding

MODES = ["compact", "refine", "tree_summarize", "simple_summarize", "accumulate", "compact_accumulate", "ours"]


class PromptEngine(MACEngine):
    """The real engine; it notes the token ids that go into the LM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompts: list[tuple[int, ...]] = []

    def answer(self, questions: Any, **options: Any) -> Any:
        self.prompts += [prompt.ids for prompt in questions if isinstance(prompt, FittedPrompt)]
        return super().answer(questions, **options)

    def stream(self, question: Any, **options: Any) -> Any:
        self.prompts.append(question.ids)
        return super().stream(question, **options)

    def taken(self) -> list[tuple[int, ...]]:
        prompts, self.prompts = self.prompts, []
        return prompts


@pytest.fixture
def engine(tiny_model: MACModel) -> PromptEngine:
    engine = PromptEngine(tiny_model)
    engine.adapt(MACDocument(name, text) for name, text in FACTS.items())
    return engine


@pytest.fixture
def files(tmp_path: Path) -> list[Document]:
    """The facts as files, with the metadata that LlamaIndex's reader gives them."""
    for name, text in FACTS.items():
        (tmp_path / f"{name}.md").write_text(text)
    documents = SimpleDirectoryReader(str(tmp_path)).load_data()
    assert all("file_path" in document.metadata for document in documents)
    assert "file_path" in documents[0].get_content(MetadataMode.LLM)
    return documents


def queries(index: Any, llm: MACLLM, mode: str, **options: Any) -> Any:
    if mode == "ours":
        synthesizer = MACSynthesizer(llm, streaming=options.get("streaming", False))
        return index.as_query_engine(llm=llm, response_synthesizer=synthesizer)
    return index.as_query_engine(llm=llm, response_mode=mode, **options)


def ask(made: Any, way: str) -> None:
    if way == "async":
        asyncio.run(made.aquery(QUESTION))
    elif way == "streaming":
        assert "".join(made.query(QUESTION).response_gen)
    else:
        made.query(QUESTION)


WAYS = [
    (mode, way)
    for mode in MODES
    for way in ("sync", "async", "streaming")
    if not (way == "streaming" and "accumulate" in mode)  # LlamaIndex cannot stream these
]


@pytest.mark.filterwarnings("ignore:a later step of refine")
@pytest.mark.parametrize(("mode", "way"), WAYS)
def test_prompts_are_those_without_metadata(engine: PromptEngine, files: list[Document], mode: str, way: str) -> None:
    llm = MACLLM(engine=engine)

    def prompts_for(documents: list[Document]) -> list[tuple[int, ...]]:
        ask(queries(SummaryIndex.from_documents(documents), llm, mode, streaming=way == "streaming"), way)
        return sorted(engine.taken())  # those of accumulate come in any order

    prompts = prompts_for(files)
    assert prompts == prompts_for([Document(text=document.text) for document in files])
    assert "file" not in engine.model.base_lm.tokenizer.decode(prompts[0])


def test_chats_hide_metadata_too(engine: PromptEngine, files: list[Document]) -> None:
    index = VectorStoreIndex.from_documents(files, embed_model=HashEmbedding())
    for mode in ("context", "condense_plus_context"):
        chat = index.as_chat_engine(chat_mode=mode, llm=MACLLM(engine=engine), skip_condense=True)  # type: ignore[arg-type]
        chat.chat(QUESTION)
        "".join(chat.stream_chat(QUESTION).response_gen)
        asyncio.run(chat.achat(QUESTION))
    prompts = engine.taken()
    assert len(prompts) == 6
    assert all("file" not in engine.model.base_lm.tokenizer.decode(prompt) for prompt in prompts)


@pytest.mark.parametrize("mode", ["compact", "ours"])
def test_metadata_can_be_asked_for(engine: PromptEngine, mode: str) -> None:
    document = Document(text=FACTS["bridge"], metadata={"date": "3 May 2004", "source": "wire"})
    document.excluded_llm_metadata_keys = ["source"]
    index = VectorStoreIndex.from_documents([document], embed_model=HashEmbedding())
    llm = MACLLM(engine=engine, metadata_mode=MetadataMode.LLM)
    queries(index, llm, mode).query(QUESTION)
    shown = llm.fit_to_window(QUESTION, [f"date: 3 May 2004\n\n{FACTS['bridge']}"])
    assert engine.taken() == [shown.ids]


def test_sources_and_nodes_keep_their_metadata(engine: PromptEngine, files: list[Document]) -> None:
    index = SummaryIndex.from_documents(files)
    before = {name: node.model_dump() for name, node in index.docstore.docs.items()}
    response = index.as_query_engine(llm=MACLLM(engine=engine)).query(QUESTION)
    assert {scored.node.metadata["file_name"] for scored in response.source_nodes} == {f"{n}.md" for n in FACTS}
    assert {name: node.model_dump() for name, node in index.docstore.docs.items()} == before


def test_other_llms_read_what_they_read_before(engine: PromptEngine, files: list[Document]) -> None:
    MACLLM(engine=engine)
    echoing = MockLLM(max_tokens=None)  # it answers with its prompt
    response = SummaryIndex.from_documents(files).as_query_engine(llm=echoing).query(QUESTION)
    assert "file_path: " in str(response)


def test_texts_that_are_not_those_of_the_nodes_stay_as_they_are(engine: PromptEngine) -> None:
    llm = MACLLM(engine=engine)
    text = f"file_path: a/b.md\n\n{FACTS['bridge']}"  # a text that looks like one with metadata
    index = VectorStoreIndex.from_documents([Document(text=text)], embed_model=HashEmbedding())
    index.as_query_engine(llm=llm).query(QUESTION)
    assert engine.taken() == [llm.fit_to_window(QUESTION, [text]).ids]


def test_one_span_handler_serves_all(engine: PromptEngine) -> None:
    for _ in range(3):
        MACLLM(engine=engine)
    names = [handler.class_name() for handler in root_dispatcher.span_handlers]
    assert names.count("MACSpanHandler") == 1
