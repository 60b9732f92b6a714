"""Checks of untrusted model folders, before transformers reads them and before memory is allocated.

transformers believes a configuration: which code to run, which other model to load, how many layers to make.
`mac_rag.lm.model_sizes` compares the described model with the weights that are there.
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
# JSON files of vocabularies; parsing them is left to the tokenizers library.
_VOCABULARIES = frozenset(("tokenizer.json", "vocab.json", "added_tokens.json"))
_LAYERS = frozenset(
    ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
)


def check_folder(folder: Path) -> None:
    """Checks the files of a model's folder, except its weights. A place that is no folder is not checked.

    Raises:
        ModelLoadError: for something that is no regular file, JSON beyond the limits, code that comes with the model, a
            kernel from the Hub, a PEFT adapter, or more layers than any model has; the message names the file.
    """
    if folder.is_dir():
        check_files(path for path in sorted(folder.iterdir()) if not path.is_dir())


def check_files(paths: Iterable[Path]) -> None:
    """As `check_folder`, for some files of a model.

    Raises:
        ModelLoadError: as `check_folder`.
    """
    for path in paths:
        if path.name == ADAPTER:  # transformers would load the model that it names, wherever it lies
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
            raise ModelLoadError(f"{path} is damaged: {error}; download it again") from None
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None


def _check_json(path: Path, content: Any) -> None:
    if path.name == "modules.json":
        for module in content if isinstance(content, list) else [content]:
            kind = module.get("type") if isinstance(module, dict) else None
            if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
                raise ModelLoadError(
                    f"{path} names the module {kind!r:.80}, but code that comes with a model is never run; choose a "
                    "model whose modules are all of sentence_transformers"
                )
    for name, value in _named_values(content):
        if name == "auto_map" and value:
            raise ModelLoadError(
                f"{path} has an auto_map, which names code that comes with the model, and such code is never run; if "
                "transformers knows the architecture itself, remove auto_map from a copy of the folder"
            )
        if "_implementation" in name and isinstance(value, str) and ("/" in value or ":" in value):
            raise ModelLoadError(
                f"{path} sets {name} to {value!r:.80}, a kernel from the Hub, which is never run; remove {name} from a "
                "copy of the folder"
            )
        if name in _LAYERS and (not isinstance(value, int | None) or not 0 <= (value or 0) <= MOST_LAYERS):
            raise ModelLoadError(f"{path} announces {value!r:.40} layers ({name}); at most {MOST_LAYERS} are allowed")
        if name == "weight_map" and isinstance(value, dict):
            outside = [file for file in value.values() if not isinstance(file, str) or Path(file).name != file]
            if outside:
                raise ModelLoadError(_not_beside(path, outside[0]))
        if name == "transformers_weights" and value and (not isinstance(value, str) or Path(value).name != value):
            raise ModelLoadError(_not_beside(path, value))


def _not_beside(path: Path, weights: Any) -> str:
    return f"{path} says that weights lie in {weights!r:.80}, which is no file beside it; get the model anew"


def _named_values(content: Any) -> Iterator[tuple[str, Any]]:
    """All values of all objects in JSON, with their names."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield name, value
            yield from _named_values(value)
    elif isinstance(content, list):
        for value in content:
            yield from _named_values(value)
