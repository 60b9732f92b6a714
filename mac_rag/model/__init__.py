"""The whole MAC model: its networks around a frozen LM, its checkpoints, its training loss."""

from mac_rag.model.mac import MACModel

__all__ = ["MACModel"]
