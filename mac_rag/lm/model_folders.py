"""Folders of models that nobody vouches for: checked before transformers reads them, and before memory is allocated.

transformers believes what a configuration says: which code to run, how many layers to make, how wide they are. So code
is refused, and the model that is described is held against the weights that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from mac_rag.errors import ModelLoadError
from mac_rag.untrusted_files import MalformedError, open_file, parse_json, read_at, read_json

MOST_LAYERS = 1024  # no LM is that deep
# A model may have so many times the numbers that its files hold, because weights are tied or stored in 4 bits, ...
_RATIO = 16
# ... and so many more, for buffers that no file holds.
_SPARE = 1 << 24
LARGEST_JSON = 16 << 20
_LARGEST_HEADER = 32 << 20
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


def check_size(place: str, *, architecture: Any, auto_class: Any, trust_remote_code: bool = False) -> None:
    """Refuses a model that is much larger than the weights in its folder, before memory is allocated for it.

    Args:
        place: the folder; without safetensors in it, nothing is checked.
        architecture: the model's configuration.
        auto_class: what makes the model of it, such as `AutoModelForCausalLM`.
        trust_remote_code: False; every loader takes it (`mac_rag.lm.loading.loaded`).

    Raises:
        ModelLoadError: for such a model, or a file of weights with a header that does not fit it.
    """
    files = sorted(Path(place).glob("*.safetensors")) if Path(place).is_dir() else []
    if not files:
        return
    held = sum(map(stored_numbers, files))
    make = getattr(auto_class, "from_config", None)
    with torch.device("meta"):
        # T5EncoderModel is no auto class, and its own code is the only one that it knows.
        model = make(architecture, trust_remote_code=trust_remote_code) if make else auto_class(architecture)
    described = sum(tensor.numel() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    if described > allowed_numbers(held):
        raise ModelLoadError(f"{place} describes a model of {described:,} numbers, but holds {held:,}")


def allowed_numbers(held: int) -> int:
    """How many numbers a model may have whose files hold this many."""
    return _RATIO * held + _SPARE


def stored_numbers(path: Path) -> int:
    """How many numbers a safetensors file holds, by its header, which is checked against the file.

    Raises:
        ModelLoadError: for a file that is missing or truncated, or whose header cannot be true.
    """
    try:
        with open_file(path, follow=True) as file:
            size = file.seek(0, 2)
            length = int.from_bytes(read_at(file, 0, 8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise MalformedError(f"a header of {length:,} bytes in a file of {size:,}")
            tensors = parse_json(read_at(file, 8, length))
    except MalformedError as error:
        raise ModelLoadError(f"{path} is truncated or damaged: {error}") from None
    except OSError as error:
        raise ModelLoadError(f"{path} is missing, or cannot be read: {error.strerror}") from None
    try:
        tensors.pop("__metadata__", None)
        numbers = 0
        for tensor in tensors.values():
            start, stop = tensor["data_offsets"]
            if not 0 <= start <= stop <= size - 8 - length or any(length < 0 for length in tensor["shape"]):
                raise ValueError("a tensor lies outside of it")
            # At most two numbers share a byte.
            numbers += min(math.prod(tensor["shape"]), 2 * (stop - start))
        return numbers
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} is truncated or damaged: {error!r}") from None


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


def _named_values(content: Any) -> Iterator[tuple[str, Any]]:
    """All values of all objects in JSON, with their names."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield name, value
            yield from _named_values(value)
    elif isinstance(content, list):
        for value in content:
            yield from _named_values(value)
