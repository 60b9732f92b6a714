"""LMs in GGUF files: checked before any reader trusts them, then loaded as plain, dequantised LMs.

Readers of GGUF allocate and loop as a file's numbers say. So all of a file's lengths are first compared with its size,
and the model that it describes with the weights that it holds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from mac_rag.errors import ModelLoadError
from mac_rag.lm.architectures import check_modulation
from mac_rag.lm.model_folders import MOST_LAYERS, check_folder, pinned

_VERSIONS = (2, 3)
# Type of a metadata value -> its format. Strings (8) and arrays (9) have no fixed size.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFContent:
    """Contents of a GGUF file, according to its header.

    Attributes:
        elements: number of elements of all its tensors together.
        layers: number of layers in its metadata; 0 if the metadata do not say.
    """

    elements: int
    layers: int


class _Reader:
    """Reads a file from its start; refuses lengths that reach beyond its end."""

    def __init__(self, data: mmap) -> None:
        self.data = data
        self.position = 0

    def skip(self, count: int) -> int:
        """Advances by `count` bytes; returns the position before."""
        start = self.position
        if count > len(self.data) - start:
            raise ValueError(f"it ends at byte {len(self.data):,}, in the middle of what byte {start:,} announces")
        self.position += count
        return start

    def number(self, form: str) -> Any:
        return struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(f"<{form}")))[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self.skip(length)
        return self.data[start : start + length].decode()

    def count(self, size: int) -> int:
        """Reads a number of entries, each of at least `size` bytes."""
        count: int = self.number("Q")
        if count * size > len(self.data) - self.position:
            raise ValueError(f"it announces {count:,} entries at byte {self.position - 8:,}, more than it has room for")
        return count

    def value(self) -> Any:
        """Reads a metadata value; None for an array, which is skipped."""
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self._format(kind))
        kind = self.number("I")
        if kind == _STRING:
            for _ in range(self.count(8)):
                self.skip(self.number("Q"))
        else:
            size = struct.calcsize(f"<{self._format(kind)}")
            self.skip(size * self.count(size))
        return None

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _FORMATS:
            raise ValueError(f"it has a metadata value of type {kind}, which cannot be read")
        return _FORMATS[kind]


def check_gguf(path: Path) -> GGUFContent:
    """Reads the header of a GGUF file, and none of its weights.

    Raises:
        ModelLoadError: if the file is no GGUF file, is truncated, or announces more than it holds.
    """
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return _content(_Reader(data))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is no complete GGUF file: {error}; download it again") from error


def _content(reader: _Reader) -> GGUFContent:
    from gguf import GGML_QUANT_SIZES

    if reader.data[:4] != b"GGUF":
        raise ValueError("it does not start with GGUF")
    reader.skip(4)
    version = reader.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"it has version {version}, and versions {' and '.join(map(str, _VERSIONS))} can be read")
    tensors, pairs = reader.number("Q"), reader.number("Q")
    if 24 * tensors + 12 * pairs > len(reader.data):
        raise ValueError(f"it announces {tensors:,} tensors and {pairs:,} metadata values, more than it has room for")
    metadata = {}
    for _ in range(pairs):
        key = reader.string()
        metadata[key] = reader.value()
    elements, size_of_all, end = 0, 0, 0
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    for _ in range(tensors):
        name, dimensions = reader.string(), reader.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"its tensor {name[:80]!r} has {dimensions:,} dimensions")
        count = prod(reader.number("Q") for _ in range(dimensions))
        kind, offset = reader.number("I"), reader.number("Q")
        if kind not in sizes:
            raise ValueError(f"its tensor {name[:80]!r} is of type {kind}, which cannot be read")
        block, block_size = sizes[kind]
        size = count // block * block_size
        elements += count
        size_of_all += size  # counts tensors that share their bytes, too
        end = max(end, offset + size)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    reader.position += -reader.position % alignment
    reader.skip(max(end, size_of_all))
    return GGUFContent(elements, _layers(metadata))


def _layers(metadata: dict[str, Any]) -> int:
    layers = metadata.get(f"{metadata.get('general.architecture')}.block_count") or 0
    if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
        raise ValueError(f"it announces {layers!r} layers")
    return layers


def load_gguf(
    place: str,
    gguf_file: str,
    revision: str | None,
    *,
    dtype: torch.dtype,
    modulation: str | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Loads an LM and its tokenizer from a GGUF file; its weights are dequantised to `dtype`.

    Args:
        place: a folder, or a repository on the Hub.
        gguf_file: the file's path in it.
        revision: branch, tag or commit on the Hub; None for the main branch.
        dtype: dtype of the weights.
        modulation: the kind of modulation that the LM must carry; None for none.
        options: further arguments of `from_pretrained`.

    Raises:
        ModelLoadError: if a package is missing; if there is no such file; if it is damaged or its header is false; if
            its LM cannot carry the modulation.
    """
    require_gguf()
    from transformers import GgufConfig

    try:
        path = Path(str(cached_file(place, gguf_file, revision=pinned(place, revision))))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"there is no {gguf_file} in {place}: {str(error).splitlines()[0]}") from error
    content = check_gguf(path)

    def read(what: str, loader: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return loader(*arguments, **named)
        except ModelLoadError:
            raise
        except Exception as error:  # the readers raise all kinds of errors on unexpected content
            detail = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelLoadError(f"cannot read {what} from {path}: {detail[0]}") from error

    file = {"gguf_file": path.name}
    check_folder(path.parent)
    architecture = read("a configuration", AutoConfig.from_pretrained, path.parent, **file, trust_remote_code=False)
    if modulation is not None:
        check_modulation(architecture, modulation)
    read("a causal LM", _check_size, path, architecture, content)
    model, report = read(
        "a causal LM",
        AutoModelForCausalLM.from_pretrained,
        path.parent,
        **file,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),  # else it may load kernels from the Hub
        trust_remote_code=False,
        output_loading_info=True,
        **options,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{path} lacks {len(missing)} of the LM's weights, such as {', '.join(missing[:3])}; take another file"
        )
    tokenizer = read("a tokenizer", AutoTokenizer.from_pretrained, path.parent, **file, trust_remote_code=False)
    return model, _without_additions(tokenizer, len(model.get_input_embeddings().weight))


def _without_additions(tokenizer: Any, size: int) -> Any:
    """The tokenizer without tokens beyond the LM's embeddings.

    transformers builds byte-level tokenizers on GPT-2's, and so adds `<|endoftext|>` to those that lack it, such as
    Llama 3's.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    known = [token for token in content["added_tokens"] if token["id"] < size]
    if len(known) < len(content["added_tokens"]):
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**content, "added_tokens": known}))
    return tokenizer


def require_gguf() -> None:
    """Checks that the packages for reading GGUF files are installed.

    Raises:
        ModelLoadError: if a package is missing; the message names the extra that installs it.
    """
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        from transformers import GgufConfig  # noqa: F401
    except ImportError as error:
        raise ModelLoadError(f"reading a GGUF file needs more packages ({error}): install mac-rag[gguf]") from None


def _check_size(path: Path, architecture: Any, content: GGUFContent) -> None:
    """Refuses a model that is larger than the file's contents, before memory is allocated for it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    count = sum(parameter.numel() for parameter in model.parameters())
    # On the meta device, tied weights may count twice.
    if count > 2 * content.elements:
        raise ModelLoadError(
            f"{path} describes an LM of {count:,} weights, but holds {content.elements:,}; download it again"
        )
