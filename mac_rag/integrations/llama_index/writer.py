"""MemoryWriter: a step of an ingestion pipeline that writes its documents to the memory bank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeAlias

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode, TextNode, TransformComponent
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.core.vector_stores.utils import metadata_dict_to_node
from pydantic import computed_field

from mac_rag.data.characters import is_blank
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, MACError
from mac_rag.integrations.framework import bank_state, in_thread
from mac_rag.integrations.llama_index.component import EngineComponent
from mac_rag.integrations.llama_index.instrumentation import listen, running_docstore, running_documents
from mac_rag.retrieval.llama_index import document_id

logger = logging.getLogger(__name__)


class MemoryWriter(EngineComponent, TransformComponent):
    """Adapts the engine's bank to the nodes of an `IngestionPipeline` and returns them unchanged.

    A node costs one pass of the amortization network if it is new or its text has changed, and nothing otherwise. The
    bank gets its text without metadata headers, and its metadata as provenance. Put the writer before any splitter:
    the engine itself splits a document that is longer than the model's limit.

    A writer only adds and updates documents. With a `MACVectorStore` as the vector store of the pipeline or index,
    documents that are deleted there are also deleted from the bank. Pipelines with `num_workers` are refused, because
    each worker would fill its own bank.

    A pipeline with a docstore does not pass known documents to the writer, so it would never refill a lost bank. If the
    bank is empty and the docstore is not, the writer raises an error; `from_index` fills the bank.

    Examples:
        >>> from llama_index.core import Document
        >>> from llama_index.core.ingestion import IngestionPipeline
        >>> from llama_index.core.node_parser import SentenceSplitter
        >>> engine = MACEngine("mac-tiny")
        >>> pipeline = IngestionPipeline(transformations=[MemoryWriter(engine), SentenceSplitter()])
        >>> nodes = pipeline.run(documents=[Document(id_="storm", text="A storm has hit Wunville.")])
        >>> [node.ref_doc_id for node in nodes], engine.bank.document_ids
        (['storm'], ['storm'])

    Args:
        engine: the engine to adapt.
        show_progress: True to show a progress bar.
    """

    show_progress: bool = False

    def __init__(self, engine: MACEngine, *, show_progress: bool = False) -> None:
        super().__init__(show_progress=show_progress)
        self._engine = engine
        listen()

    @classmethod
    def from_index(cls, index: NodeSource, engine: MACEngine | None = None, *, show_progress: bool = False) -> Self:
        """Fills a bank from the documents of an existing index, and returns a writer for new documents.

        Documents that the bank holds with the same text and metadata cost nothing, and no document is deleted. A bank
        on disk is committed every few hundred documents, so after an interruption the same call resumes. Documents
        without text, and others that cannot be adapted, are left out, with a warning.

        Examples:
            >>> from llama_index.core import Document, MockEmbedding, VectorStoreIndex
            >>> storm = Document(id_="storm", text="A storm has hit Wunville.")
            >>> index = VectorStoreIndex.from_documents([storm], embed_model=MockEmbedding(embed_dim=8))
            >>> writer = MemoryWriter.from_index(index, MACEngine("mac-tiny"))
            >>> writer.engine.bank.document_ids
            ['storm']

        Args:
            index: an index, a docstore, a vector store that stores texts, or a Chroma collection.
            engine: the engine whose bank to fill; None for a new one with the default model.
            show_progress: True to show a progress bar.

        Raises:
            ConfigError: for an index whose vector store cannot list its nodes.
            FingerprintError: if another model wrote the bank.
        """
        writer = cls(MACEngine() if engine is None else engine, show_progress=show_progress)
        writer._adapt(documents_in(index))
        return writer

    @classmethod
    def class_name(cls) -> str:
        return "MACMemoryWriter"

    # The pipeline's cache skips a step if it has seen its fields and texts before. With these fields, it skips the
    # writer only if the same model has written the same nodes to this very bank and the bank has not changed since.
    # Otherwise a cache that outlives the bank would leave a new bank empty, and pass over a document with the text of
    # another.

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that writes the bank."""
        return self.engine.model.fingerprint

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bank_state(self) -> str:
        """Name and version of the bank; unique across processes."""
        return bank_state(self.engine.bank)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def running(self) -> str:
        """Digest of the ids of the documents of the pipeline that is running in this context; empty outside of one."""
        return running_documents()

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Adapts the bank and returns `nodes`. Nodes that cannot be adapted, such as blank ones, cause a warning.

        Raises:
            BankError: if two nodes belong to one document of the bank; if the bank is empty and the docstore is not.
            FingerprintError: if another model wrote the bank.
        """
        documents = self._documents(nodes)
        self._check_docstore(documents)
        self._adapt(documents)
        return nodes

    def _adapt(self, documents: Sequence[Document]) -> None:
        def leave_out(_: Document, error: MACError) -> None:
            logger.warning("a document is left out of the memory bank: %s", error)

        self.engine.adapt(documents, on_bad=leave_out, progress=self.show_progress)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Like a call, without blocking the event loop."""
        return await in_thread(self, nodes, **kwargs)

    def _documents(self, nodes: Sequence[BaseNode]) -> list[Document]:
        """The nodes as documents for the bank."""
        documents: dict[str, Document] = {}
        for node in nodes:
            bank_id = document_id(node)
            if bank_id in documents:
                raise BankError(
                    f"two nodes belong to document {bank_id!r}, which the bank files as one; put MemoryWriter before "
                    "the splitter"
                )
            text = node.get_content(metadata_mode=MetadataMode.NONE)
            documents[bank_id] = Document(bank_id, text, dict(node.metadata))
        return list(documents.values())

    def _check_docstore(self, documents: Sequence[Document]) -> None:
        """Checks that no docstore of a pipeline withholds documents from an empty bank."""
        docstore = running_docstore()
        if docstore is None or len(self.engine.bank):
            return
        known = set(docstore.get_all_document_hashes().values()).difference(document.id for document in documents)
        if any(_may_have_text(docstore, name) for name in known):
            raise BankError(
                f"the pipeline's docstore knows {len(known)} documents, such as {min(known)!r}, and the memory bank is "
                "empty: it is not filled yet, or lost, and the pipeline does not pass these documents to it; fill it "
                "by MemoryWriter.from_index(source, engine), where source is the docstore or the index, then run the "
                "pipeline again"
            )


def _may_have_text(docstore: BaseDocumentStore, name: str) -> bool:
    """False for a document without text, which no bank holds."""
    node = docstore.get_document(name, raise_error=False)
    return node is None or not is_blank(node.get_content(metadata_mode=MetadataMode.NONE))


NodeSource: TypeAlias = Any  # BaseIndex, BaseDocumentStore, BasePydanticVectorStore, or a Collection of chromadb

_PAGE = 1000  # records of a Chroma collection that are read at a time


def documents_in(source: NodeSource) -> list[Document]:
    """The documents of a source, joined from their nodes, in its order; logs a warning if some have no text.

    Raises:
        ConfigError: for a source of another kind, or one that cannot list its nodes.
    """
    nodes: dict[str, list[BaseNode]] = {}
    for node in _nodes_in(source):
        nodes.setdefault(document_id(node), []).append(node)
    documents = [Document(name, _text(parts), dict(parts[0].metadata)) for name, parts in nodes.items()]
    without = [document.id for document in documents if is_blank(document.text)]
    if without:
        logger.warning("%d documents without text were left out, such as %r", len(without), without[0])
    return [document for document in documents if not is_blank(document.text)]


def _nodes_in(source: NodeSource) -> Iterable[BaseNode]:
    if isinstance(source, BaseDocumentStore):
        return source.docs.values()
    if isinstance(source, BasePydanticVectorStore):
        return _in_vector_store(source)
    if isinstance(source, BaseIndex):
        return _in_index(source)
    if type(source).__module__.partition(".")[0] == "chromadb" and hasattr(source, "get"):
        return _in_collection(source)
    raise ConfigError(
        f"{type(source).__name__} is not a source of documents; give an index, a docstore, a vector store of "
        "LlamaIndex, or a Chroma collection"
    )


def _in_index(index: BaseIndex[Any]) -> Iterable[BaseNode]:
    struct = index.index_struct
    listed = getattr(struct, "nodes_dict", None) or getattr(struct, "nodes", None)
    if isinstance(listed, dict):
        listed = list(listed.values())
    # Several indexes may share a docstore; the index structure lists the nodes of this one.
    nodes = list(index.docstore.docs.values()) if not listed else index.docstore.get_nodes(listed, raise_error=False)
    store = getattr(index, "vector_store", None)
    if not nodes and store is not None and store.stores_text:
        return _in_vector_store(store)
    return nodes


def _in_vector_store(store: BasePydanticVectorStore) -> list[BaseNode]:
    try:
        return store.get_nodes(node_ids=None, filters=None)
    except NotImplementedError:
        raise ConfigError(
            f"{type(store).__name__} cannot list its nodes; give the docstore, or the index if it has one "
            "(store_nodes_override=True)"
        ) from None


def _in_collection(collection: Any) -> Iterator[BaseNode]:
    for first in range(0, collection.count(), _PAGE):
        page = collection.get(limit=_PAGE, offset=first, include=["documents", "metadatas"])
        for name, text, metadata in zip(page["ids"], page["documents"], page["metadatas"], strict=True):
            if metadata and "_node_content" in metadata:  # written by LlamaIndex
                node = metadata_dict_to_node(metadata, text=text or "")
            else:
                node = TextNode(id_=name, text=text or "", metadata=dict(metadata or {}))
            yield node


def _text(nodes: list[BaseNode]) -> str:
    """The text of a document, joined from its nodes without repeating their overlaps.

    LlamaIndex takes the first place where a node's text occurs for its position, which is wrong for repeated sentences.
    """
    text, end = "", 0
    for node in _in_order(nodes):
        part = node.get_content(metadata_mode=MetadataMode.NONE)
        start = node.start_char_idx if isinstance(node, TextNode) else None
        if not text or start is None:
            text = f"{text}\n\n{part}" if text else part
        elif start < end < start + len(part) and text.endswith(part[: end - start]):
            text += part[end - start :]
        else:
            text += (" " if start != end else "") + part
        end = max(end, (start or 0) + len(part))
    return text


def _in_order(nodes: list[BaseNode]) -> list[BaseNode]:
    """The nodes of a document as they follow each other, or else by their positions, if all have one."""
    following = {None if node.prev_node is None else node.prev_node.node_id: node for node in nodes}
    ordered = []
    node = following.get(None)
    while node is not None:
        ordered.append(node)
        node = following.pop(node.node_id, None)
    if len(ordered) == len(nodes):
        return ordered
    if all(isinstance(node, TextNode) and node.start_char_idx is not None for node in nodes):
        return sorted(nodes, key=lambda node: node.start_char_idx or 0)  # type: ignore[attr-defined]
    return nodes
