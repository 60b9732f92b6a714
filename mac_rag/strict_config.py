"""What all configurations have in common: they are frozen, and strict about their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from mac_rag.errors import ConfigError

_FAULTS = 20  # invalid values that one message names


class Config(BaseModel):
    """Base of all configurations: immutable, and an unknown or ill-typed key is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: Any, where: str | Path) -> Self:
        """Validates values read from a file.

        Args:
            values: the file's content.
            where: the file, for the message.

        Raises:
            ConfigError: for invalid values; it names the file, and up to 20 offending keys and their values.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = [
                f"  {'.'.join(map(str, fault['loc'])) or '(top level)'}: {fault['msg']} (got {fault['input']!r:.200})"
                for fault in error.errors()
            ]
            if len(faults) > _FAULTS:
                faults[_FAULTS:] = [f"  and {len(faults) - _FAULTS:,} more"]
            raise ConfigError(f"{where} is not a valid {cls.__name__}:\n" + "\n".join(faults)) from None
