"""What all configurations have in common: they are frozen, strict about their keys, and still read former names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mac_rag.errors import ConfigError

_FAULTS = 20  # invalid values that one message names
# A field's new name; or what turns the old field's value into values of new fields, by name.
Renaming: TypeAlias = str | Callable[[Any], Mapping[str, Any]]


class Config(BaseModel):
    """Base of all configurations: immutable, and an unknown or ill-typed key is an error that names it.

    Attributes:
        RENAMED: fields that had another name in the last release, old name -> `Renaming`. The old names are still read,
            with a FutureWarning that tells the new ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    RENAMED: ClassVar[Mapping[str, Renaming]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, values: Any) -> Any:
        """Replaces old field names by the new ones."""
        old_names = [name for name in cls.RENAMED if isinstance(values, Mapping) and name in values]
        if not old_names:
            return values
        values = dict(values)
        for old in old_names:
            renaming, value = cls.RENAMED[old], values.pop(old)
            fields = {renaming: value} if isinstance(renaming, str) else renaming(value)
            new_names = " and ".join(fields)
            both = [name for name in fields if name in values]
            if both:
                raise ValueError(f"{old} is the old name of {new_names}; give only {' and '.join(both)}")
            warnings.warn(
                f"{cls.__name__}: {old} is now called {new_names}; the next release no longer reads the old name",
                FutureWarning,
                stacklevel=2,
            )
            values |= fields
        return values

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
