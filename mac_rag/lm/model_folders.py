"""Folders of models that nobody vouches for: checked before transformers reads them, and before memory is allocated.

transformers believes what a configuration says: which code to run, which other model to load, how many layers to make.
`mac_rag.lm.model_sizes` holds the model that is described against the weights that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mac_rag.errors import ModelLoadError
from mac_rag.untrusted_files import MalformedError, open_file, read_json

MOST_LAYERS = 1024  # no LM is that deep
LARGEST_JSON = 16 << 20
ADAPTER = "adapter_config.json"
# Bytes of a folder's own configuration of its vocabulary; they are left to the tokenizers library.
_VOCABULARIES = frozenset(("tokenizer.json", "vocab.json", "added_tokens.json"))
_LAYERS = frozenset(
    ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
)


def check_folder(folder: Path) -> None:
    """Checks the files of a model's folder, without its weights. Of another place it checks nothing.

    Raises:
        ModelLoadError: for a file that is no file, JSON beyond all bounds, code of the folder's own, a kernel from the
            Hub, an adapter of PEFT, or more layers than any model has; it names the file.
    """
    if folder.is_dir():
        check_files(path for path in sorted(folder.iterdir()) if not path.is_dir())


def check_files(paths: Iterable[Path]) -> None:
    """As `check_folder`, for some files of a model.

    Raises:
        ModelLoadError: as `check_folder`.
    """
    for path in paths:
        if path.name == ADAPTER:  # transformers would load the model that it names, wherever that lies
            raise ModelLoadError(
                f"{path} makes this an adapter of another model; merge it into that model (merge_and_unload of PEFT) "
                "and save the whole, or remove the file from a copy of the folder to use the model without it"
            )
        try:
            if path.suffix == ".json" and path.name not in _VOCABULARIES:
                _check_json(path, read_json(path, LARGEST_JSON, follow=True))
            elif path.suffix in (".json", ".safetensors", ".model", ".txt", ".jinja"):
                open_file(path, follow=True).close()
        except MalformedError as error:
            raise ModelLoadError(f"{path} is damaged: {error}") from None
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None


def _check_json(path: Path, content: Any) -> None:
    if path.name == "modules.json":
        for module in content if isinstance(content, list) else [content]:
            kind = module.get("type") if isinstance(module, dict) else None
            if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
                raise ModelLoadError(f"{path} names the module {kind!r:.80}, and code that a model brings is never run")
    for name, value in _named_values(content):
        if name == "auto_map" and value:
            raise ModelLoadError(
                f"{path} has an auto_map, which names code of the model's own, and such code is never run; if "
                "transformers knows the architecture itself, remove auto_map from a copy of the folder"
            )
        if "_implementation" in name and isinstance(value, str) and ("/" in value or ":" in value):
            raise ModelLoadError(f"{path} sets {name} to {value!r:.80}, a kernel from the Hub, and none is ever run")
        if name in _LAYERS and (not isinstance(value, int | None) or not 0 <= (value or 0) <= MOST_LAYERS):
            raise ModelLoadError(f"{path} announces {value!r:.40} layers ({name})")
        if name == "weight_map" and isinstance(value, dict):
            outside = [file for file in value.values() if not isinstance(file, str) or Path(file).name != file]
            if outside:
                raise ModelLoadError(f"{path} says that weights lie in {outside[0]!r:.80}, which is no file beside it")
        if name == "transformers_weights" and value and (not isinstance(value, str) or Path(value).name != value):
            raise ModelLoadError(f"{path} says that weights lie in {value!r:.80}, which is no file beside it")


def _named_values(content: Any) -> Iterator[tuple[str, Any]]:
    """All values of all objects in JSON, with their names."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield name, value
            yield from _named_values(value)
    elif isinstance(content, list):
        for value in content:
            yield from _named_values(value)
