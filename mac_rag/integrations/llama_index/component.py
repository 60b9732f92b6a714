"""What all LlamaIndex components of MAC share: the engine they hold, and which bank document a node belongs to."""

from __future__ import annotations

import inspect
from typing import Any, Self

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseComponent

from mac_rag.engine import MACEngine
from mac_rag.errors import MACError


class EngineComponent(BaseComponent):
    """A component around a `MACEngine`. Copies share the engine; it belongs to one process and is never pickled."""

    _engine: MACEngine = PrivateAttr()

    @property
    def engine(self) -> MACEngine:
        return self._engine

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """Builds the component from `to_dict`; the engine, which no dictionary holds, is given beside it."""
        accepted = inspect.signature(cls).parameters
        return cls(**{name: value for name, value in {**data, **kwargs}.items() if name in accepted})

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()

    def __getstate__(self) -> dict[str, Any]:
        raise MACError(
            f"{type(self).__name__} holds the networks and the memory bank of this process and cannot be pickled; "
            "run the pipeline without num_workers, or build a component in each process"
        )
