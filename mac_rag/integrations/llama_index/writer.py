"""MemoryWriter: a step of an ingestion pipeline that makes the memory bank remember the documents passing through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from pydantic import computed_field

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError
from mac_rag.integrations.llama_index.component import EngineComponent
from mac_rag.memory.bank import MemoryBank
from mac_rag.retrieval.llama_index import FiledBy, document_id

_names: WeakKeyDictionary[MemoryBank, str] = WeakKeyDictionary()


class MemoryWriter(EngineComponent, TransformComponent):
    """Adapts the engine's bank to the nodes of an `IngestionPipeline` and hands them on unchanged.

    A node costs one pass of the amortization network when it is new or its text has changed, and nothing otherwise.
    Its text goes into the bank without metadata headers, its metadata as provenance. Put the writer in front of any
    splitter: the engine itself divides a document that is beyond the model's limit.

    A writer only adds and updates. With a `MACVectorStore` as the vector store of the pipeline or index, the bank also
    forgets what is deleted there. A pipeline with `num_workers` is refused, since each worker would fill a bank of its
    own.

    Args:
        engine: the one to adapt.
        filed_by: `source` to file each document under its id, which then has to arrive as one node; `node` to file
            every node under its own id, for parts whose ids stay the same from run to run; see `document_id`.
        show_progress: shows a progress bar.
    """

    filed_by: FiledBy = "source"
    show_progress: bool = False

    def __init__(self, engine: MACEngine, *, filed_by: FiledBy = "source", show_progress: bool = False) -> None:
        super().__init__(filed_by=filed_by, show_progress=show_progress)
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        return "MACMemoryWriter"

    # The pipeline's cache skips a step whose fields and nodes it has seen. These two fields let it skip only where
    # the same model has written the same nodes to this very bank, and the bank has not changed since. A cache that
    # outlives the bank must not leave a new one empty.

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fingerprint(self) -> str:
        """Of the model that writes the bank."""
        return self.engine.model.fingerprint

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bank_state(self) -> str:
        """Which bank it is, and its version; unique beyond this process."""
        bank = self.engine.bank
        return f"{_names.setdefault(bank, uuid4().hex)}/{bank.version}"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Adapts the bank and returns `nodes`.

        Raises:
            BankError: when two nodes belong to one document of the bank.
            DocumentError: for a node without text.
            FingerprintError: when another model wrote the bank.
        """
        self.engine.adapt(self._documents(nodes), progress=self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As a call, without blocking the event loop."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def _documents(self, nodes: Sequence[BaseNode]) -> list[Document]:
        documents: dict[str, Document] = {}
        for node in nodes:
            filed = document_id(node, self.filed_by)
            if filed in documents:
                raise BankError(
                    f"two nodes belong to document {filed!r}, which the bank files as one; put MemoryWriter in front "
                    "of the splitter, or file each node under an id of its own with filed_by='node'"
                )
            text = node.get_content(metadata_mode=MetadataMode.NONE)
            documents[filed] = Document(filed, text, dict(node.metadata))
        return list(documents.values())
