"""The models in the package, and the fingerprints by which banks know them.

A bank carries the fingerprint of its model, and this table gives it back its name.
"""

from __future__ import annotations

DEFAULT_MODEL = "mac-small"  # where none is named

FINGERPRINTS = {
    "mac-small": "fd77fa1f82423039910f0a21f0dc16df692ed1eb98dcb7a90ec1f1c7dbbd7262",
    "mac-tiny": "dbc82313c8501978f46198789ba0372844ff08245147934a7cd8aea6fb89340d",
}


def shipped_name(fingerprint: str) -> str | None:
    """The name of the shipped model with this fingerprint; None for another model."""
    return next((name for name, own in FINGERPRINTS.items() if own == fingerprint), None)


def describe(fingerprint: str, name: str | None = None) -> str:
    """Names a model in a message; `name` is the one by which people know a model that is not shipped."""
    model = f"model {fingerprint[:12]}"
    return shipped_name(fingerprint) or (f"{name} ({model})" if name else model)
