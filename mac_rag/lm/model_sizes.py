"""The size of a model that a configuration describes, held against its weights before memory is allocated for it."""

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

# A model may have so many times the numbers that its files hold, because weights are tied or stored in 4 bits, ...
_RATIO = 16
# ... and so many more, for buffers that no file holds.
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

    Of a model on the Hub, the weights are downloaded first.

    Args:
        place: folder, or repository on the Hub; without safetensors in it, nothing is checked.
        architecture: the model's configuration.
        auto_class: what makes the model of it, such as `AutoModelForCausalLM`.
        revision: of a repository on the Hub, as `mac_rag.lm.hub_revisions.pinned` returned it.
        weights: the file of the weights; None for the files that transformers takes.
        trust_remote_code: False; every loader takes it (`mac_rag.lm.loading.loaded`).

    Raises:
        ModelLoadError: for such a model, a file of weights with a header that does not fit it, or an index that names
            a file that is not there.
    """
    make = getattr(auto_class, "from_config", None)
    with torch.device("meta"):
        # T5EncoderModel is no auto class, and its own code is the only one that it knows.
        model = make(architecture, trust_remote_code=trust_remote_code) if make else auto_class(architecture)
    files = _weight_files(place, revision, weights or getattr(model.config, "transformers_weights", None))
    if files is None:
        return
    held = sum(map(stored_numbers, files))
    described = sum(tensor.numel() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    if described > allowed_numbers(held):
        raise ModelLoadError(f"{place} describes a model of {described:,} numbers, but holds {held:,}")


def _weight_files(place: str, revision: str | None, name: str | None) -> list[Path] | None:
    """The files from which transformers takes a model's weights; None if there are no safetensors."""
    for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if name is None else (name,):
        path = cached_path(place, file, revision)
        if path is not None:
            return _shards(place, revision, path) if file.endswith(".json") else [path]
    # Of a checkpoint that several processes have written, transformers takes all.
    return sorted(Path(place).glob("*.safetensors")) or None


def _shards(place: str, revision: str | None, index: Path) -> list[Path]:
    check_files([index])  # and so all of them lie beside it
    content = read_json(index, LARGEST_JSON, follow=True)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise ModelLoadError(f"{index} names no files of weights (weight_map)")
    shards = []
    for name in sorted(set(names.values())):
        path = cached_path(place, name, revision)
        if path is None:
            raise ModelLoadError(f"{index} says that weights lie in {name!r:.80}, and there is no such file")
        shards.append(path)
    return shards


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


class AllocationLimit(TorchDispatchMode):
    """A context in which new tensors may have so many numbers together; the next is refused before it is allocated.

    Args:
        numbers: the limit.
        where: the file whose description is followed, for the message.
    """

    def __init__(self, numbers: int, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = self._left = numbers
        self._where = where

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        size = args[0] if args else None
        # Only what makes tensors from nothing has a size for its first argument.
        if isinstance(size, list | tuple) and all(isinstance(length, int) for length in size):
            self._left -= math.prod(size)
        elif operation.overloadpacket.__name__ == "arange":
            self._left -= int(max(abs(bound) for bound in args if isinstance(bound, int | float)))
        if self._left < 0:
            raise ModelLoadError(
                f"{self._where} describes networks of more than {self._limit:,} numbers, which its weights cannot fill"
            )
        return operation(*args, **(kwargs or {}))
