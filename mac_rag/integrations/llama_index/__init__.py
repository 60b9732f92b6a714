"""MAC in LlamaIndex: an LLM, a node postprocessor and an ingestion step around one `MACEngine`, and retrievers.

How they go together:

    engine = MACEngine()
    pipeline = IngestionPipeline(transformations=[MemoryWriter(engine), SentenceSplitter(), embedding])
    index = VectorStoreIndex(pipeline.run(documents=documents), embed_model=embedding)
    answers = index.as_query_engine(llm=MACLLM(engine=engine), node_postprocessors=[MACNodePostprocessor(engine)])
    answers.query("Who opened the museum?")
"""

from __future__ import annotations

try:
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "mac_rag.integrations.llama_index needs LlamaIndex, which is not installed; "
        "get it with: pip install 'mac-rag[llama-index]'"
    ) from error

from mac_rag.integrations.llama_index.component import FilteredDocuments
from mac_rag.integrations.llama_index.instrumentation import DocumentsTruncatedEvent
from mac_rag.integrations.llama_index.llm import MACLLM
from mac_rag.integrations.llama_index.memory_block import MACMemoryBlock
from mac_rag.integrations.llama_index.postprocessor import MACNodePostprocessor
from mac_rag.integrations.llama_index.retriever import MACRetriever
from mac_rag.integrations.llama_index.synthesizer import MACSynthesizer
from mac_rag.integrations.llama_index.vector_store import MACVectorStore
from mac_rag.integrations.llama_index.writer import MemoryWriter
from mac_rag.retrieval.llama_index import LlamaIndexRetriever

__all__ = [
    "MACLLM",
    "DocumentsTruncatedEvent",
    "FilteredDocuments",
    "LlamaIndexRetriever",
    "MACMemoryBlock",
    "MACNodePostprocessor",
    "MACRetriever",
    "MACSynthesizer",
    "MACVectorStore",
    "MemoryWriter",
]
