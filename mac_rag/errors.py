"""Every error that mac_rag raises on purpose. Each message names the offending value and the remedy."""

from __future__ import annotations


class MACError(Exception):
    """Base of all errors of this package.

    It derives from `Exception` alone, because LlamaIndex catches more specific errors where the user needs to read the
    message: its refine synthesizer catches `ValueError` and `TypeError` and answers "Empty Response", and its async
    helpers catch `RuntimeError` and report "Detected nested async".
    """


class ConfigError(MACError):
    """A configuration with an unknown, missing or contradictory value."""


class ModelLoadError(MACError):
    """A model or checkpoint that cannot be loaded: unknown name, wrong architecture, truncated or wrong weights."""


class InstructionError(MACError):
    """A request that needs an LM which follows instructions, made to a checkpoint that follows none."""


class QuantizationError(MACError):
    """A quantization that this machine or this use (training) does not support."""


class DocumentError(MACError):
    """A document that cannot be adapted: it is empty, not a text, or longer than the limit."""


class PromptError(MACError):
    """A conversation that the LM's chat template cannot write, or that exceeds the LM's window."""


class BankError(MACError):
    """A memory bank that is empty, damaged, or misused (a duplicate id, an unknown id)."""


class FingerprintError(BankError):
    """A memory bank that was written by a different model from the one that is to read it."""


class FullDiskError(BankError):
    """A change of a bank for which the disk has no room; nothing was changed."""


class DamageError(BankError):
    """A file of a bank whose content is not what was written."""


class ShardLostError(BankError):
    """A shard of a bank that cannot be reached at the moment; it restarts from its folder."""


class DataError(MACError):
    """A data file with a missing column or a malformed row; names the file, the row and the column."""


class WorkerError(MACError):
    """A worker process of a cluster that died repeatedly, or failed for a reason outside of mac_rag."""


class CancelledError(MACError):
    """A request that was dropped, because nobody waited for it any more when its turn came."""
