"""Names of constructor arguments, which LangChain's classes do not check."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from mac_rag.errors import ConfigError


def check_names(cls: type[BaseModel], given: dict[str, Any], without_effect: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of a constructor without those that have no effect.

    Raises:
        ConfigError: for an argument that the class does not have, which LangChain would ignore.
    """
    known = {name for field, info in cls.model_fields.items() for name in (field, info.alias) if name}
    if unknown := sorted(set(given) - known - set(without_effect)):
        raise ConfigError(
            f"{cls.__name__} has no argument {', '.join(unknown)}; it has {', '.join(sorted(cls.model_fields))}"
        )
    return {name: value for name, value in given.items() if name not in without_effect}
