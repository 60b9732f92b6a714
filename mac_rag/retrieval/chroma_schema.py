"""Refuses a Chroma collection whose schema would have chromadb build and run what others have chosen."""

from __future__ import annotations

from typing import Any

from mac_rag.errors import ConfigError


def check_schema(collection: Any, place: str) -> None:
    """Refuses a collection that names an embedding function; those that mac_rag makes have none.

    chromadb builds such a function when it reads the schema, at the first write. A sentence encoder among them may run
    the code of its model's folder.

    Args:
        collection: chromadb's collection, whose schema was not read yet.
        place: where it is, for the error.

    Raises:
        ConfigError: names the functions.
    """
    model = collection._model
    if foreign := _embedding_functions(model.configuration_json, model.serialized_schema):
        raise ConfigError(
            f"the collection {collection.name!r} in {place} has an embedding function ({', '.join(foreign)}), which "
            "chromadb would build and run; use a collection that mac_rag has made"
        )


def _embedding_functions(*values: Any) -> list[str]:
    """Names of the embedding functions in a collection's configuration and schema."""
    names, left = set(), list(values)
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        function = value.get("embedding_function") if isinstance(value, dict) else None
        if function is not None and not (isinstance(function, dict) and function.get("type") in ("legacy", "unknown")):
            names.add(str(function.get("name") if isinstance(function, dict) else function)[:40])
    return sorted(names)
