"""The sizes of pretrained models: those of the presets from a table, others from their configuration alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from mac_rag.config import BaseLMConfig
from mac_rag.errors import ConfigError
from mac_rag.lm.fetched import FETCHABLE, fetched_revisions, local_place
from mac_rag.lm.hub_revisions import pinned
from mac_rag.lm.loading import loaded, resolve
from mac_rag.lm.minilm import PACKAGED
from mac_rag.untrusted_files import read_json

_TABLE = Path(__file__).with_name("architectures.json")
_LARGEST = 1 << 20


@cache
def known() -> dict[str, dict[str, Any]]:
    """Name of a pretrained model -> its sizes, as its published configuration states them."""
    table: dict[str, dict[str, Any]] = read_json(_TABLE, _LARGEST)
    return table


def architecture(name: str, revision: str | None = None, folder: Path | None = None) -> Any:
    """The transformers configuration of a model, of which no weights are loaded.

    Args:
        name: a folder, a model of the table, or a repository on the Hub, from which the configuration is downloaded.
        revision: of a repository on the Hub.
        folder: the checkpoint that `./` names refer to; None for none.

    Raises:
        ConfigError: for a name in which a pipeline refers to the result of another stage.
        ModelLoadError: when there is no such model.
    """
    if name.startswith("${"):
        raise ConfigError(
            f"{name} is the result of another stage; give its folder: --set base_lm.name=FOLDER, or "
            "model.base_lm.name where the recipe has a model"
        )
    place = resolve(name, folder)
    if not Path(place).is_dir():
        if place in PACKAGED:
            return PACKAGED[place].lm().config
        if place in known() and (place not in FETCHABLE or not fetched_revisions(place)):
            sizes = dict(known()[place])
            return AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    place = local_place(place, revision)
    return loaded("an architecture", place, AutoConfig.from_pretrained, revision=pinned(place, revision))


def lm_architecture(config: BaseLMConfig, folder: Path | None = None) -> Any:
    """The architecture of a base LM; the arguments and errors are those of `architecture`.

    Raises:
        ConfigError: for a GGUF file, whose sizes are known only once it is read.
    """
    if config.gguf_file is not None:
        raise ConfigError(
            f"the sizes of {config.gguf_file} are known only once it is read; give the folder of the LM in safetensors"
        )
    return architecture(config.name, config.revision, folder)
