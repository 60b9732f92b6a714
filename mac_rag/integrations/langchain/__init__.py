"""MAC in LangChain: a chat model and a retriever around one `MACEngine`.

How they go together:

    engine = MACEngine()
    engine.adapt(to_documents(documents))
    llm = ChatMAC(engine=engine)
    llm.invoke("Who opened the museum?").content
"""

from __future__ import annotations

try:
    import langchain_core  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "mac_rag.integrations.langchain needs LangChain, which is not installed; "
        "get it with: pip install 'mac-rag[langchain]'"
    ) from error

from mac_rag.integrations.langchain.chat_model import ChatMAC, create_documents_chain
from mac_rag.integrations.langchain.documents import MACRetriever, WhereMetadata, to_documents

__all__ = ["ChatMAC", "MACRetriever", "WhereMetadata", "create_documents_chain", "to_documents"]
