"""A frozen language model with a memory of amortized contexts, alone and joined with retrieval.

The names below are the public API. Each is imported when it is first used, so that `import mac_rag` loads no PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mac_rag.shipped_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from mac_rag.bank import MemoryBank
    from mac_rag.data.types import Document
    from mac_rag.engine import Answer, MACEngine
    from mac_rag.model import MACModel

    __version__: str

__all__ = ["DEFAULT_MODEL", "Answer", "Document", "MACEngine", "MACModel", "MemoryBank", "__version__"]

_MODULES = {
    "Answer": "mac_rag.engine",
    "Document": "mac_rag.data.types",
    "MACEngine": "mac_rag.engine",
    "MACModel": "mac_rag.model",
    "MemoryBank": "mac_rag.bank",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mac-rag")
    if name not in _MODULES:
        raise AttributeError(f"module 'mac_rag' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
