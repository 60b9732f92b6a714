"""Compares the size of the model that a configuration describes with its weights, before memory is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from mac_rag.errors import ModelLoadError
from mac_rag.lm.hub_revisions import cached_path
from mac_rag.lm.model_folders import LARGEST_JSON, check_files
from mac_rag.untrusted_files import MalformedError, open_file, parse_json, read_at, read_json

# A model may have this many times the numbers that its files hold, because weights are tied or stored in 4 bits,
_RATIO = 16
# and this many more, for buffers that no file holds.
_SPARE = 1 << 24
_LARGEST_HEADER = 32 << 20


def check_size(
    place: str,
    *,
    architecture: Any,
    auto_class: Any,
    revision: str | None = None,
    weights: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Refuses a model that is much larger than its weights, before memory is allocated for it.

    For a model on the Hub, this downloads the weights.

    Args:
        place: folder, or repository on the Hub; without safetensors in it, nothing is checked.
        architecture: the model's configuration.
        auto_class: class that makes the model from the configuration, such as `AutoModelForCausalLM`.
        revision: revision of a repository on the Hub, as `mac_rag.lm.hub_revisions.pinned` returned it.
        weights: the file of the weights; None for the files that transformers takes.
        trust_remote_code: always False; `mac_rag.lm.loading.loaded` passes it to every loader.

    Raises:
        ModelLoadError: for such a model, for a weight file whose header does not fit the file, and for an index that
            names a missing file.
    """
    make = getattr(auto_class, "from_config", None)
    with torch.device("meta"):
        # T5EncoderModel is no auto class; it never runs code that comes with a model.
        model = make(architecture, trust_remote_code=trust_remote_code) if make else auto_class(architecture)
    files = _weight_files(place, revision, weights or getattr(model.config, "transformers_weights", None))
    if files is None:
        return
    held = sum(map(stored_numbers, files))
    described = sum(tensor.numel() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    if described > allowed_numbers(held):
        raise ModelLoadError(
            f"{place} describes a model of {described:,} numbers, but holds {held:,}; download it again"
        )


def _weight_files(place: str, revision: str | None, name: str | None) -> list[Path] | None:
    """The files from which transformers loads a model's weights; None if there are no safetensors."""
    for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if name is None else (name,):
        path = cached_path(place, file, revision)
        if path is not None:
            return _shards(place, revision, path) if file.endswith(".json") else [path]
    # If several processes wrote the checkpoint, transformers takes all of their files.
    return sorted(Path(place).glob("*.safetensors")) or None


def _shards(place: str, revision: str | None, index: Path) -> list[Path]:
    check_files([index])  # also checks that all weight files lie beside it
    content = read_json(index, LARGEST_JSON, follow=True)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise ModelLoadError(f"{index} names no files of weights (weight_map); download it again")
    shards = []
    for name in sorted(set(names.values())):
        path = cached_path(place, name, revision)
        if path is None:
            raise ModelLoadError(
                f"{index} says that weights lie in {name!r:.80}, but there is no such file; download the model again"
            )
        shards.append(path)
    return shards


def allowed_numbers(held: int) -> int:
    """Largest number of parameters and buffer entries of a model whose files hold `held` numbers."""
    return _RATIO * held + _SPARE


def stored_numbers(path: Path) -> int:
    """Number of elements in a safetensors file according to its header, which is checked against the file's size.

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
        raise ModelLoadError(f"{path} is truncated or damaged: {error}; get it anew") from None
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
        raise ModelLoadError(f"{path} is truncated or damaged: {error!r}; get it anew") from None


class AllocationLimit(TorchDispatchMode):
    """A context that limits the elements of all new tensors together; it refuses the next before it is allocated.

    Args:
        numbers: largest number of elements.
        where: the file that describes the networks, for the message.

    Raises:
        ModelLoadError: within the context, for a tensor beyond the limit.
    """

    def __init__(self, numbers: int, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = self._left = numbers
        self._where = where

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        size = args[0] if args else None
        # Only operations that create tensors have a size as their first argument.
        if isinstance(size, list | tuple) and all(isinstance(length, int) for length in size):
            self._left -= math.prod(size)
        elif operation.overloadpacket.__name__ == "arange":
            self._left -= int(max(abs(bound) for bound in args if isinstance(bound, int | float)))
        if self._left < 0:
            raise ModelLoadError(
                f"{self._where} describes networks of more than {self._limit:,} numbers, which its weights cannot "
                "fill; get it anew"
            )
        return operation(*args, **(kwargs or {}))
