"""Objects that a user names as `module:attr`."""

from __future__ import annotations

import importlib
from typing import Any

from mac_rag.errors import ConfigError


def import_object(spec: str) -> Any:
    """The object that `module:attr` names: an importable module, and a name in it, with dots for names in names.

    Examples:
        >>> import_object("json:decoder.JSONDecoder").__name__
        'JSONDecoder'

    Raises:
        ConfigError: for a name of another form, and for what cannot be imported.
    """
    module, colon, attribute = spec.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(f"{spec!r} is not of the form module:attr")
    try:
        value: Any = importlib.import_module(module)
        for name in attribute.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot import {spec!r}: {error}") from error
    return value
