"""Retrievers: they find documents for a question, independently of the memory bank."""

from mac_rag.retrieval.base import Hit, Retriever
from mac_rag.retrieval.bm25 import BM25Retriever, Tokenizer
from mac_rag.retrieval.dense import DenseRetriever
from mac_rag.retrieval.hybrid import HybridRetriever
from mac_rag.retrieval.registry import RETRIEVERS, make_retriever

__all__ = [
    "RETRIEVERS",
    "BM25Retriever",
    "DenseRetriever",
    "Hit",
    "HybridRetriever",
    "Retriever",
    "Tokenizer",
    "make_retriever",
]
