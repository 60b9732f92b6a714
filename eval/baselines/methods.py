"""The names of the methods that the experiments compare."""

from __future__ import annotations

FINE_TUNING = ("uniform", "salient-spans", "camels")
ADAPTING = (*FINE_TUNING, "ccm", "mac")
METHODS = ("zero-shot", "few-shot", "retriever", *ADAPTING)
