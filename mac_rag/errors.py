"""Every error that mac_rag raises on purpose. Each message names the offending value and the remedy."""

from __future__ import annotations


class MACError(Exception):
    """Base of all errors of this package.

    It derives from `Exception` alone, because LlamaIndex swallows more special errors where the user needs to read the
    message: its refine synthesizer catches `ValueError` and `TypeError` and answers "Empty Response", and its async
    helpers catch `RuntimeError` and report "Detected nested async".
    """


class ConfigError(MACError):
    """A configuration with an unknown, missing or contradictory value."""


class ModelLoadError(MACError):
    """A model or checkpoint that cannot be loaded: unknown name, another architecture, truncated or foreign weights."""


class InstructionError(MACError):
    """A request that only an LM which follows instructions can serve, made to a checkpoint that follows none."""


class QuantizationError(MACError):
    """A quantization that this machine or this use (training) does not support."""


class DocumentError(MACError):
    """A document that cannot be adapted: it is empty, not a text, or longer than the limit."""


class PromptError(MACError):
    """A conversation that the LM's chat template cannot write, or that is beyond the LM's window."""


class BankError(MACError):
    """A memory bank that is empty, damaged, or misused (a duplicate id, an unknown id)."""


class FingerprintError(BankError):
    """A memory bank written by another model than the one that is to read it."""


class DamageError(BankError):
    """A file of a bank that is not what was written."""


class ShardLostError(BankError):
    """A shard of a bank that cannot be reached now; it restarts from its folder."""


class DataError(MACError):
    """A data file with a missing column or a malformed row; names the file, the row and the column."""


class WorkerError(MACError):
    """A worker process of a cluster that died again and again, or failed for a reason that is none of ours."""


class CancelledError(MACError):
    """A request that was not run, because nobody waited for it any more when its turn came."""
