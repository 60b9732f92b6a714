"""The memory bank: documents as memory tokens in one SQLite file, and how a network reads it."""

from mac_rag.bank.bank import BankEntry, MemoryBank

__all__ = ["BankEntry", "MemoryBank"]
