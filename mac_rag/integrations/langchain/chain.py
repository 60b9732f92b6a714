"""A question and its documents, as LangChain's chains hand them on, for a `ChatMAC`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableLambda

from mac_rag.errors import MACError
from mac_rag.integrations.langchain.chat_model import ChatMAC


def create_documents_chain(
    llm: ChatMAC, *, question_key: str = "input", documents_key: str = "context"
) -> Runnable[dict[str, Any], AIMessage]:
    """What answers a question from documents: LangChain's `create_stuff_documents_chain`, without a prompt.

    A checkpoint that reads question and context has no use for the wording of a prompt. Here each document stays a
    document of its own, in the form of the training, and where the LM's window is short, the last ones are left out,
    never the question. It goes with `create_retrieval_chain`, which expects these keys.

    Examples:
        >>> from langchain_core.documents import Document
        >>> chain = create_documents_chain(ChatMAC(model="mac-tiny"))
        >>> text = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> chain.invoke({"input": "How many workers does Rainga Press have?", "context": [Document(text)]}).content
        '180'

    Args:
        llm: the chat model.
        question_key: the key of the question, a text.
        documents_key: the key of the documents, the best first.

    Returns:
        A runnable from a dictionary to a message; it streams, and batches, as the chat model does.
    """

    def ask(values: Mapping[str, Any]) -> Runnable[Any, AIMessage]:
        question, documents = values.get(question_key), values.get(documents_key)
        if not isinstance(question, str) or documents is None:
            raise MACError(
                f"a documents chain reads a question from {question_key!r} and documents from {documents_key!r}, and "
                f"the keys here are: {', '.join(map(str, values)) or 'none'}"
            )
        bound = llm.bind(contexts=[document.page_content for document in documents])
        return RunnableLambda(lambda _: question) | bound

    return RunnableLambda(ask, name="mac_documents_chain")
