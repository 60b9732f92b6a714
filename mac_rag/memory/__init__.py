"""The memory bank: memory tokens of documents, in memory and on disk."""

from mac_rag.memory.bank import BankEntry, MemoryBank

__all__ = ["BankEntry", "MemoryBank"]
