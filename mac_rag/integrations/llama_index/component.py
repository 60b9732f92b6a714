"""The base of MAC's LlamaIndex components: they hold an engine."""

from __future__ import annotations

import inspect
from typing import Any, Self

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseComponent

from mac_rag.engine import MACEngine
from mac_rag.errors import MACError


class EngineComponent(BaseComponent):
    """A LlamaIndex component around a `MACEngine`. Copies share the engine; it is never pickled."""

    _engine: MACEngine = PrivateAttr()

    @property
    def engine(self) -> MACEngine:
        """The engine of the component."""
        return self._engine

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """Builds a component from the dictionary of `to_dict`.

        Args:
            data: the dictionary.
            kwargs: arguments that the dictionary does not hold, the engine among them.
        """
        accepted = inspect.signature(cls).parameters
        return cls(**{name: value for name, value in {**data, **kwargs}.items() if name in accepted})

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()

    def __getstate__(self) -> dict[str, Any]:
        raise MACError(
            f"{type(self).__name__} holds the networks and the memory bank of this process and cannot be pickled; "
            "run the pipeline without num_workers, or build a component in each process"
        )
