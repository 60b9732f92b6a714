"""Checkpoints of MAC models: a folder of JSON, safetensors and tokenizers. Reading one checks all names of weights.

config.json             the configuration: all sizes, the base models and their revisions; the kind of the model
model.safetensors       MAC's own networks
amortization/           architecture of the amortization network's backbone; its tokenizer, if it is not the base LM's
input_encoder/          the same for the input encoder
sentence_encoder/       architecture of the sentence encoder, if there is one
rows.safetensors        codebooks for banks with rows `pq`, if they were fitted (`mac_rag.nn.product_quantizer`)
base_lm/                the base LM, if it was tuned or is not on the Hub

A checkpoint reads and writes the parts of a model; `mac_rag.model.AmortizedModel` assembles them. Other kinds of models
have other files, but all have a `config.json` (`read_values`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from mac_rag.config import EncoderConfig, MACConfig, SentenceEncoderConfig
from mac_rag.errors import ConfigError, MACError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.devices import DeviceMap, require_weights
from mac_rag.lm.loading import INT8_LM, empty_backbone, from_int8, load_backbone, load_tokenizer, loaded, quiet, to_int8
from mac_rag.lm.lora_tuning import merged
from mac_rag.lm.model_folders import AllocationLimit, allowed_numbers, is_commit, stored_numbers, warn_unpinned
from mac_rag.model.factory import make_encoder, make_hashed_bm25, make_sentence_encoder
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.lexical import HashedBM25
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.shipped_models import FINGERPRINTS
from mac_rag.untrusted_files import MalformedError, open_file, read_file, read_json

FORMAT = 1
SHIPPED = Path(__file__).parents[1] / "shipped"
WEIGHTS = "model.safetensors"
QUANTIZER = "rows.safetensors"
CONFIG = "config.json"
AMORTIZED = "amortized"  # the kind of a model whose configuration names none
SENTENCE_ENCODER = "sentence_encoder"
_LARGEST_CONFIG = 1 << 20
_LARGEST_QUANTIZER = 256 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt", "vocab.json")


@dataclass(frozen=True)
class Parts:
    """The parts that a model is assembled from.

    Attributes:
        config: the configuration of all networks.
        base_lm: the frozen LM.
        amortization: g_amort.
        input_encoder: g_input.
        limit: limits the memory of a model of these parts, if their description comes from a file; otherwise None.
    """

    config: MACConfig
    base_lm: BaseLM
    amortization: TextEncoder
    input_encoder: TextEncoder
    limit: AllocationLimit | None = None

    @property
    def encoders(self) -> dict[str, TextEncoder]:
        """Both text encoders by the names of their folders."""
        return {"amortization": self.amortization, "input_encoder": self.input_encoder}


def write(
    parts: Parts,
    weights: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype | None,
    *,
    lm_was_trained: bool,
    quantizer: ProductQuantizer | None,
) -> None:
    """Writes a checkpoint; see `AmortizedModel.save_pretrained`.

    Args:
        parts: the parts of the model.
        weights: the weights of MAC's own networks, by name (`AmortizedModel.mac_state`).
        folder: a new or empty folder.
        dtype: dtype of the stored weights; None keeps each weight's own.
        lm_was_trained: True if the base LM was trained; then the checkpoint stores it.
        quantizer: codebooks for banks with rows `pq`; None without them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = parts.config
    if lm_was_trained or Path(config.base_lm.name).is_dir() or config.base_lm.name.startswith("./"):
        embedded = config.base_lm.model_copy(update={"name": "./base_lm", "revision": None, "gguf_file": None})
        config = config.model_copy(update={"base_lm": embedded})
        _save_base_lm(parts.base_lm, folder / "base_lm", dtype)
    for name, encoder in parts.encoders.items():
        encoder.network.backbone.config.save_pretrained(folder / name)
        if not _same_tokenizer(encoder.tokenizer, parts.base_lm.tokenizer):
            encoder.tokenizer.save_pretrained(folder / name)
    if parts.amortization.network.sentence_encoder is not None:
        parts.amortization.network.sentence_encoder.config.save_pretrained(folder / SENTENCE_ENCODER)
    save_file(_stored(weights, dtype), folder / WEIGHTS, metadata={"format": "pt"})
    if quantizer is not None:
        write_quantizer(quantizer, folder)
    text = json.dumps({"format": FORMAT, **config.model_dump(mode="json")}, indent=2)
    (folder / CONFIG).write_text(text + "\n")


def read(folder: Path, device: torch.device, device_map: DeviceMap | None = None) -> Parts:
    """The parts of a checkpoint, without the weights of MAC's own networks, which `fill` loads.

    Args:
        folder: the checkpoint.
        device: device of the LM.
        device_map: where the LM's parts go, instead of `device`; None to use `device`.

    Raises:
        ModelLoadError: if files are missing, or have another format or architecture.
    """
    config = read_config(folder)
    numbers = allowed_numbers(stored_numbers(folder / WEIGHTS))
    base_lm = BaseLM.load(config.base_lm, config.prompt, device, folder, config.modulation.kind, device_map)
    numbers += sum(parameter.numel() for parameter in base_lm.model.parameters())  # encoders may share them
    limit = AllocationLimit(numbers, str(folder / CONFIG))
    sentence_encoder = None
    with limit:
        if config.sentence_encoder is not None:
            sentence_encoder = _sentence_encoder(folder / SENTENCE_ENCODER, config.sentence_encoder, base_lm)
        hashed_bm25 = make_hashed_bm25(config, base_lm)
    amortization, input_encoder = (
        _encoder(folder / name, part, config, base_lm, sentence_encoder, hashed_bm25, limit)
        for name, part in (("amortization", config.amortization), ("input_encoder", config.input_encoder))
    )
    return Parts(config, base_lm, amortization, input_encoder, limit)


@contextmanager
def unexpected(folder: Path) -> Iterator[None]:
    """Turns any error that libraries raise on unexpected files into one that names the folder.

    Raises:
        ModelLoadError: for any error that is no `MACError`.
    """
    try:
        yield
    except MACError:
        raise
    except Exception as error:
        detail = str(error).strip().splitlines() or [""]
        raise ModelLoadError(
            f"the checkpoint {folder} cannot be loaded: {type(error).__name__}: {detail[0][:500]}; download it again"
        ) from error


def fill(parameters: Mapping[str, Tensor], path: Path) -> None:
    """Copies stored weights into parameters of exactly the same names and shapes.

    Args:
        parameters: name in checkpoints -> parameter.
        path: a safetensors file.

    Raises:
        ModelLoadError: if the file is missing, truncated or damaged, or if names or shapes differ; the message lists
            the differences.
    """
    try:
        with open_file(path, follow=True):
            stored = from_int8(load_file(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is missing, truncated or damaged: {error}; download it again") from error
    differences = [
        f"{name}: {'missing in the file' if name not in stored else 'unknown to the model'}"
        for name in sorted(parameters.keys() ^ stored.keys())
    ] + [
        f"{name}: {list(stored[name].shape)} in the file, {list(parameters[name].shape)} in the model"
        for name in sorted(parameters.keys() & stored.keys())
        if stored[name].shape != parameters[name].shape
    ]
    if differences:
        shown = "\n  ".join(differences[:20])
        more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
        raise ModelLoadError(f"{path} does not match its configuration:\n  {shown}{more}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])


def write_quantizer(quantizer: ProductQuantizer, folder: Path) -> None:
    """Writes the codebooks for banks with rows `pq` beside the weights that they were fitted to."""
    save_file(quantizer.tensors, folder / QUANTIZER, metadata={"format": "pt"})


def read_quantizer(folder: Path) -> ProductQuantizer | None:
    """The codebooks of a checkpoint; None if it has none.

    Raises:
        ModelLoadError: if their file is damaged, or holds something else.
    """
    path = folder / QUANTIZER
    try:
        data = read_file(path, _LARGEST_QUANTIZER, follow=True)
        return ProductQuantizer.of_tensors(load(data))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is damaged: {error}; fit it again (python -m pipelines.fit_rows)") from error


def find(name_or_path: str | Path, revision: str | None) -> Path:
    """The folder of a checkpoint: a path, a shipped model such as `mac-small`, or one of the Hub.

    Raises:
        ModelLoadError: if there is no model of that name.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    name = str(name_or_path)
    if name in FINGERPRINTS:
        return SHIPPED / name
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        shipped = ", ".join(FINGERPRINTS)
        raise ModelLoadError(
            f"no MAC model {name!r}: it is no folder, not shipped with the package ({shipped}), and not on the Hub, or "
            f"the Hub cannot be reached ({type(error).__name__}); give a folder, a shipped model or a repository"
        ) from error
    if revision is None and is_commit(folder.name):
        warn_unpinned(name, folder.name)
    return folder


def read_values(folder: Path) -> tuple[str, dict[str, Any]]:
    """The kind of a checkpoint's model, and the values of its configuration, not validated.

    Raises:
        ModelLoadError: if the file is missing, not JSON, or of another format.
    """
    path = folder / CONFIG
    try:
        values: dict[str, Any] = read_json(path, _LARGEST_CONFIG, follow=True)
        version = values.pop("format")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        detail = f" ({error})" if isinstance(error, MalformedError) else ""
        raise ModelLoadError(
            f"{folder} is no MAC checkpoint: its {path.name} is missing or has no format{detail}; give the folder of a "
            "checkpoint"
        ) from error
    if version != FORMAT:
        raise ModelLoadError(
            f"{path} has format {version!r:.40}, but this version reads format {FORMAT}; update mac_rag"
        )
    return str(values.pop("kind", AMORTIZED)), values


def read_config(folder: Path) -> MACConfig:
    """The configuration of a checkpoint of an amortized model.

    Raises:
        ModelLoadError: as `read_values`; and for another kind of model, or invalid values.
    """
    kind, values = read_values(folder)
    if kind != AMORTIZED:
        raise ModelLoadError(f"{folder} holds a model of the kind {kind!r:.40}, but {AMORTIZED!r} is needed")
    try:
        return MACConfig.parse(values, folder / CONFIG)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error


def _encoder(
    folder: Path,
    part: EncoderConfig,
    config: MACConfig,
    base_lm: BaseLM,
    sentence_encoder: Any,
    hashed_bm25: HashedBM25 | None,
    limit: AllocationLimit,
) -> TextEncoder:
    if part.quantization != "none":
        backbone = load_backbone(part, base_lm.device)
    else:
        architecture = _architecture(folder)
        with limit:
            backbone = empty_backbone(part, architecture)
    has_own = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = load_tokenizer(str(folder)) if has_own else base_lm.tokenizer
    with limit:
        return make_encoder(config, part, backbone, tokenizer, base_lm, sentence_encoder, hashed_bm25)


def _sentence_encoder(folder: Path, part: SentenceEncoderConfig, base_lm: BaseLM) -> Any:
    backbone = empty_backbone(EncoderConfig(design="encoder-only", name=part.name), _architecture(folder))
    return make_sentence_encoder(part, backbone, base_lm.tokenizer, base_lm)


def _architecture(folder: Path) -> Any:
    return loaded("an architecture", str(folder), AutoConfig.from_pretrained)


def _save_base_lm(base_lm: BaseLM, folder: Path, dtype: torch.dtype | None) -> None:
    require_weights(base_lm.model, "storing the LM in a checkpoint")
    lm = merged(base_lm.model)
    base_lm.tokenizer.save_pretrained(folder)
    if dtype == torch.int8:
        lm.config.save_pretrained(folder)
        # Tied weights are one parameter and are stored once.
        save_file(_stored(dict(lm.named_parameters()), dtype), folder / INT8_LM, metadata={"format": "pt"})
        return
    state = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in lm.state_dict().items()}
    # transformers cannot bring weights back into the form that it read them in if that was NF4's already.
    read_quantised = getattr(getattr(lm, "hf_quantizer", None), "pre_quantized", False)
    with quiet():
        lm.save_pretrained(folder, state_dict=state, save_original_format=not read_quantised)


def _stored(state: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    here = {name: tensor.detach().cpu() for name, tensor in state.items()}
    if dtype == torch.int8:
        return to_int8(here)
    return {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in here.items()}


def _same_tokenizer(ours: Any, theirs: Any) -> bool:
    """True if two tokenizers give the same ids for every text."""
    if ours is theirs:
        return True
    if not (ours.is_fast and theirs.is_fast):
        return False
    alike: bool = ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    return alike and ours.special_tokens_map == theirs.special_tokens_map


# A digest of everything in a model that changes an answer, so that others can repeat a result.
#
# The fingerprint says which banks a model may read, so it covers only what a bank depends on. The answer digest leaves
# out only what cannot change an answer: where the weights came from; and the versions of libraries, whose rounding
# differs no more than that of devices. Results record fingerprint and versions beside it.

# Fields of `MACConfig`'s parts that say where weights and tokenizer come from; the digest covers these themselves.
_PLACES = frozenset(("name", "revision", "gguf_file"))
# Fields of transformers' configurations that say where a model comes from, or which version wrote it.
_ORIGINS = frozenset(
    ("_name_or_path", "name_or_path", "transformers_version", "architectures", "_from_model_config", "dtype")
)
# State of a tokenizer that its calls change.
_CALLS = ("truncation", "padding")


def answer_digest(parts: Parts, state: Mapping[str, Any]) -> str:
    """The digest; see `AmortizedModel.answer_digest`.

    Args:
        parts: the parts of the model.
        state: all of its weights and buffers, by name.

    Raises:
        ConfigError: if weights of the LM are offloaded and so cannot be read.
    """
    require_weights(parts.base_lm.model, "an answer digest")
    digest = hashlib.sha256()
    for name, value in _described(parts):
        digest.update(f"{name}: {json.dumps(value, sort_keys=True, default=str)}\n".encode())
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _described(parts: Parts) -> Iterator[tuple[str, Any]]:
    """Everything except weights, by name, as values for JSON."""
    yield "configuration", _without(parts.config.model_dump(mode="json", exclude={"languages"}), _PLACES)
    lm = parts.base_lm.model
    yield "LM", _without(lm.config.to_dict(), _ORIGINS)
    yield "generation", _without(lm.generation_config.to_dict(), _ORIGINS)
    yield "tokenizer", _tokenizer(parts.base_lm.tokenizer)
    for name, encoder in parts.encoders.items():
        yield name, _without(encoder.network.backbone.config.to_dict(), _ORIGINS)
        yield f"{name} tokenizer", _tokenizer(encoder.tokenizer)
        sentence_encoder = encoder.network.sentence_encoder
        if sentence_encoder is not None:
            yield f"{name} sentence encoder", _without(sentence_encoder.config.to_dict(), _ORIGINS)


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        content = {name: value for name, value in rules.items() if name not in _CALLS}
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return {
        "content": content,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat": getattr(tokenizer, "chat_template", None),
    }


def _without(values: Any, names: frozenset[str]) -> Any:
    """A copy of nested values without the fields in `names`."""
    if isinstance(values, Mapping):
        return {str(name): _without(value, names) for name, value in values.items() if name not in names}
    if isinstance(values, list | tuple):
        return [_without(value, names) for value in values]
    return values
