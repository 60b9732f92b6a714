"""The whole MAC model: its networks around a frozen LM, and its checkpoints."""

from mac_rag.model.mac import BATCH_TOKENS, MACModel

__all__ = ["BATCH_TOKENS", "MACModel"]
