"""Whole models: a frozen LM with a memory, and its checkpoints. Its import registers all kinds of models."""

from mac_rag.model.amortized import AmortizedModel
from mac_rag.model.base import BATCH_TOKENS, MACModel, Phi
from mac_rag.model.own_kv import OwnKVModel, ReadRow, ReadRows

__all__ = ["BATCH_TOKENS", "AmortizedModel", "MACModel", "OwnKVModel", "Phi", "ReadRow", "ReadRows"]
