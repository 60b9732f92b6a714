"""Untrusted models in folders and on the Hub: what is checked before transformers reads them or allocates memory.

transformers believes a configuration: which code to run, which other model to load, how many layers to make. Here its
files are checked, the described model is compared with the weights that are there, and all parts of a model come from
one commit of the Hub.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

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


_COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/")

_CHECKED = ("config.json", "tokenizer_config.json", ADAPTER)  # what can name code, or another model


def split_revision(place: str) -> tuple[str, str | None]:
    """Name and revision of `NAME@REVISION`; a folder, or a name without `@`, has no revision."""
    if Path(place).is_dir():
        return place, None
    name, _, revision = place.partition("@")
    return name, revision or None


def pinned(name: str, revision: str | None) -> str | None:
    """The commit that a name on the Hub stands for; it stays the same until the process ends.

    If no revision is chosen, a warning names the commit. The files that could name code, or another model, are checked.

    Args:
        name: repository on the Hub, or a folder, which has no revision.
        revision: branch, tag or commit; None for the newest commit.

    Returns:
        The commit; `revision` itself for a folder, or if neither the Hub nor its cache knows the repository.

    Raises:
        ModelLoadError: as `check_files`.
    """
    return revision if Path(name).exists() else _pinned(name, revision)


@cache
def _pinned(name: str, revision: str | None) -> str | None:
    commit = revision
    for file in _CHECKED:
        path = cached_path(name, file, commit)
        if path is None:
            continue
        check_files([path])
        match = _SNAPSHOT.search(path.as_posix())
        commit = match[1] if match else commit
    if revision is None and commit is not None:
        warn_unpinned(name, commit)
    return commit


def cached_path(name: str, file: str, revision: str | None) -> Path | None:
    """The path on disk of a model's file, which is downloaded if necessary.

    Args:
        name: repository on the Hub, or a folder.
        file: the file's path in it.
        revision: revision of a repository.

    Returns:
        The path; None if there is no such file, or if neither the Hub nor its cache knows the repository.
    """
    try:
        path = cached_file(name, file, revision=revision)
    except (OSError, ValueError):  # loading the model reports the error
        return None
    return None if path is None else Path(path)


def check_modules(name: str, revision: str | None) -> None:
    """Checks the folders in which sentence-transformers stores the parts of a model.

    Args:
        name: repository on the Hub, or a folder.
        revision: as `pinned` returned it.

    Raises:
        ModelLoadError: as `check_files`.
    """
    if Path(name).exists():
        for folder in (path for path in sorted(Path(name).glob("*")) if path.is_dir()):
            check_folder(folder)
        return
    path = cached_path(name, "modules.json", revision)
    if path is None:
        return
    check_files([path])
    for module in read_json(path, LARGEST_JSON, follow=True):
        if module.get("path"):
            files = (cached_path(name, f"{module['path']}/{file}", revision) for file in _CHECKED)
            check_files(file for file in files if file is not None)


def warn_unpinned(name: str, commit: str) -> None:
    """Warns which commit of a repository is used because no revision was chosen."""
    warnings.warn(
        f"no revision was given for {name}, so commit {commit} is used, the newest one known here; to keep it, give it "
        f"as the revision (in a configuration, `revision`; in the name of an encoder, {name}@{commit})",
        UserWarning,
        stacklevel=3,
    )


def is_commit(revision: str | None) -> bool:
    """True for a full commit hash, the only revision that can never move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


# A model may have this many times the numbers that its files hold, because weights are tied or stored in 4 bits,
_RATIO = 16
# and this many more, for buffers that no file holds.
_SPARE = 1 << 24


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
        revision: revision of a repository on the Hub, as `pinned` returned it.
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
    """Number of elements in a safetensors file according to its header, which safetensors checks against the file.

    Raises:
        ModelLoadError: for a file that is missing or truncated, or whose header cannot be true.
    """
    try:
        with open_file(path, follow=True), safe_open(path, framework="pt") as file:
            numbers: int = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        return numbers
    except (MalformedError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is truncated or damaged: {error}; get it anew") from None
    except OSError as error:
        raise ModelLoadError(f"{path} is missing, or cannot be read: {error.strerror}") from None


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
