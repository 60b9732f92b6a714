"""Loads the model for a bank: the one that the user names, or else the one that wrote the bank."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mac_rag.cli.run import settle
from mac_rag.errors import BankError, ConfigError
from mac_rag.shipped_models import DEFAULT_MODEL, FINGERPRINTS, describe, shipped_name

if TYPE_CHECKING:
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.model import MACModel


def load_model(
    name: str | None,
    bank: MemoryBank | None,
    place: Path,
    *,
    device: str | None = None,
    device_map: str | None = None,
) -> MACModel:
    """Loads the model for a bank.

    Args:
        name: the model; None for the one that wrote the bank, or the default for a new bank.
        bank: the bank; None for a new one.
        place: its file.
        device, device_map: as `MACModel.from_pretrained` takes them.

    Raises:
        ConfigError: without a name, if the model that wrote the bank is neither shipped nor in its folder, or unknown.
        FingerprintError: if another model wrote the bank; names both.
        ModelLoadError: see `MACModel.from_pretrained`.
    """
    from mac_rag.model import MACModel

    chosen = model_for(name, bank, place)
    model = MACModel.from_pretrained(chosen, device=device, device_map=device_map)
    settle()
    if bank is not None:
        bank.check_model(model.fingerprint, chosen)
    return model


def model_for(name: str | None, bank: MemoryBank | None, place: Path) -> str:
    """The name of the model to load; see `load_model`."""
    if name is not None or bank is None:
        return name or DEFAULT_MODEL
    writer = known_name(bank)
    if writer is None:
        raise ConfigError(
            f"{place} does not say which model wrote it ({describe(bank.fingerprint)}), and no shipped one did; name "
            "the model: --model MODEL"
        )
    if shipped_name(bank.fingerprint):
        return writer
    # Anybody may have written the bank, so it must not cause a download or a request to another machine.
    if Path(writer).is_absolute() and not writer.startswith(("//", "\\\\")) and Path(writer).is_dir():
        return writer
    raise ConfigError(
        f"{place} was written by {writer}, which is not in a folder of that name here; name the model: --model {writer}"
    )


def known_name(bank: MemoryBank) -> str | None:
    """The name of the model that wrote a bank, for people to read; None if it is not known."""
    return shipped_name(bank.fingerprint) or bank.model


def keep_model_name(bank: MemoryBank, name: str) -> None:
    """Notes the name of its model in a bank on disk, unless its fingerprint is that of a shipped model."""
    is_folder = Path(name).is_dir()
    # The name of a shipped model beside another fingerprint would lead to the wrong weights.
    if bank.path is None or shipped_name(bank.fingerprint) or (not is_folder and name in FINGERPRINTS):
        return
    with suppress(BankError):  # the name is a convenience, and the bank is complete without it
        bank.name_model(str(Path(name).resolve()) if is_folder else name)
