"""The name of the model that wrote a bank, in a file of its own beside the manifest.

The fingerprint says which model can read a bank; the name says where to find it. So the name is a hint: what is found
there must have the fingerprint. A bank need not have the file, and versions that do not know it leave it alone.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mac_rag.atomic_files import sealed, unsealed, write_text
from mac_rag.untrusted_files import MalformedError, read_text_bytes

MODEL_NAME = "model.json"
_LONGEST = 4096  # characters of a name
_LARGEST = 64 << 10  # bytes of the file


def read_model_name(folder: Path, fingerprint: str) -> str | None:
    """The name of the model that wrote a bank.

    Args:
        folder: folder of the bank.
        fingerprint: fingerprint of the bank.

    Returns:
        The name; None where there is none, it cannot be read, or it is that of another bank's model.
    """
    try:
        content = unsealed(read_text_bytes(folder / MODEL_NAME, _LARGEST))
    except (OSError, MalformedError):
        return None
    name = content.get("name")
    if content.get("fingerprint") != fingerprint or not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        return None
    return name


def copy_model_name(source: Path, folder: Path, fingerprint: str) -> None:
    """Gives a copy of a bank the name of its model, where there is one and it can be written; a bank needs none."""
    name = read_model_name(source, fingerprint)
    if name is not None:
        with suppress(OSError):
            write_model_name(folder, fingerprint, name)


def write_model_name(folder: Path, fingerprint: str, name: str) -> None:
    """Writes the name of the model that wrote the bank in a folder, if it is not there.

    Raises:
        OSError: when the file cannot be written.
    """
    if len(name) <= _LONGEST and read_model_name(folder, fingerprint) != name:
        write_text(folder / MODEL_NAME, sealed({"fingerprint": fingerprint, "name": name}).decode())
