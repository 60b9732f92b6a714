"""The whole MAC model: its networks around a frozen LM, its checkpoints, its training loss."""

from mac_rag.model.mac import BATCH_TOKENS, MACModel

__all__ = ["BATCH_TOKENS", "MACModel"]
