"""The models in the package by version, and the fingerprints by which banks know them.

`mac-small@1` names one version of the weights for good; the plain name `mac-small` is the newest. A bank carries
the fingerprint of its model, and this table gives it back its name.
"""

from __future__ import annotations

# Name -> the fingerprints of its versions, the first one first. A line is never changed, only appended to.
FINGERPRINTS: dict[str, tuple[str, ...]] = {
    "mac-small": (
        "c2de37d0863f3e639b236f3e1d7a91aee01696a993b954f0bdba43247361a0dc",
        "5c130a0b4218ced40b4579789109a25ed3c15510a9584c4aed8f14b25f720204",
        "26a07466b6e7c4dcf6dc1d53b7905b9f09a984967f9c8938ee40f231d01d5b30",
        "e0a8e0938b68d126bea8258d82c56cbdc5cd8335a1fa5ebf574166f3881c0b66",
    ),
    "mac-tiny": (
        "3172397d910772fa4d1ea7a551d62e02196a5aa1465b46e0e621405dc0cdc27e",
        "a23a112cddb382956236e881cbd9c934acc585c9821b8aa2ddaa7fd9b478b9b3",
    ),
    "mac-tiny-hops": ("1f473296fb36fd504dc82b09bdcc3e723de382e20d4aef55cfd8265a80a2a21f",),
}


def versions(name: str) -> list[str]:
    """The versions of a shipped model by their full names, the newest last; none for another model.

    Examples:
        >>> versions("mac-tiny-hops")
        ['mac-tiny-hops@1']
    """
    return [f"{name}@{number}" for number in range(1, len(FINGERPRINTS.get(name, ())) + 1)]


def version_of(fingerprint: str) -> str | None:
    """The full name of the shipped model with this fingerprint; None for a model that was never shipped."""
    for name, fingerprints in FINGERPRINTS.items():
        if fingerprint in fingerprints:
            return versions(name)[fingerprints.index(fingerprint)]
    return None


def describe(fingerprint: str) -> str:
    """Names a model in a message."""
    return version_of(fingerprint) or f"model {fingerprint[:12]}"
