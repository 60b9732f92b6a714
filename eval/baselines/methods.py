"""The names of the compared methods, as options accept them."""

from __future__ import annotations

FINE_TUNING = ("uniform", "salient-spans", "camels")
ADAPTING = (*FINE_TUNING, "ccm", "mac")
METHODS = ("zero-shot", "few-shot", "retriever", *ADAPTING)
