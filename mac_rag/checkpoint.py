"""Checkpoints of MAC models: one folder of JSON, safetensors and tokenizers, checked name by name when it is read.

config.json             the configuration: all sizes, the base models and their revisions
model.safetensors       MAC's own networks
amortization/           architecture and tokenizer of the amortization network's backbone
input_encoder/          the same of the input encoder's
index/                  architecture of the index, where there is one
base_lm/                the base LM, where it was trained along or has no name on the Hub
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from mac_rag.building import make_encoder, make_index, make_words
from mac_rag.config import EncoderConfig, IndexConfig, MACConfig
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.int8_storage import packed, unpacked
from mac_rag.lm.loading import PACKED_LM, empty_backbone, load_backbone, load_tokenizer, quiet
from mac_rag.lm.lora_tuning import merged
from mac_rag.model import MACModel
from mac_rag.nn.hashed_bm25 import HashedWords

if TYPE_CHECKING:
    from mac_rag.encoder import TextEncoder

FORMAT = 1
SHIPPED = Path(__file__).parent / "models"
_ENCODERS = ("amortization", "input_encoder")


def save(model: MACModel, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes a checkpoint; see `MACModel.save_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    if model.base_lm_trained or Path(config.base_lm.name).is_dir() or config.base_lm.name.startswith("./"):
        embedded = config.base_lm.model_copy(update={"name": "./base_lm", "revision": None})
        config = config.model_copy(update={"base_lm": embedded})
        _save_base_lm(model.base_lm, folder / "base_lm", dtype)
    for name in _ENCODERS:
        encoder: TextEncoder = getattr(model, name)
        encoder.network.backbone.config.save_pretrained(folder / name)
        encoder.tokenizer.save_pretrained(folder / name)
    if model.amortization.network.index is not None:
        model.amortization.network.index.config.save_pretrained(folder / "index")
    save_file(_stored(model.mac_state(), dtype), folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({"format": FORMAT, **config.model_dump(mode="json")}, indent=2)
    (folder / "config.json").write_text(text + "\n")


def load(name_or_path: str | Path, *, revision: str | None, device: torch.device) -> MACModel:
    """Reads a checkpoint; see `MACModel.from_pretrained`."""
    folder = find(name_or_path, revision)
    config = read_config(folder)
    base_lm = BaseLM.load(config.base_lm, config.prompt, device, folder)
    index = None if config.index is None else _index(folder / "index", config.index, base_lm)
    words = make_words(config, base_lm)
    encoders = [_encoder(folder / name, getattr(config, name), config, base_lm, index, words) for name in _ENCODERS]
    model = MACModel(config, base_lm, *encoders)
    _fill(model, folder / "model.safetensors")
    return model.eval()


def push(model: MACModel, repository: str, *, private: bool, token: str | None) -> str:
    """Uploads a checkpoint; see `MACModel.push_to_hub`."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    return str(address)


def find(name_or_path: str | Path, revision: str | None) -> Path:
    """The folder of a checkpoint: a path, a shipped model, or a download from the Hub.

    Raises:
        ModelLoadError: when there is none of that name.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    name = str(name_or_path)
    if (SHIPPED / name / "config.json").is_file() and "/" not in name:
        return SHIPPED / name
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        shipped = ", ".join(sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))) or "none"
        raise ModelLoadError(
            f"no MAC model {name!r}: it is no folder, not shipped with the package ({shipped}), "
            f"and not on the Hub or the Hub cannot be reached ({type(error).__name__})"
        ) from error


def read_config(folder: Path) -> MACConfig:
    """The configuration of a checkpoint.

    Raises:
        ModelLoadError: when the file is missing, not JSON, or of another format.
    """
    path = folder / "config.json"
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        found = values.pop("format")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{folder} is no MAC checkpoint: {path.name} is missing or not of its format") from error
    if found != FORMAT:
        raise ModelLoadError(f"{path} has format {found!r}, this version reads format {FORMAT}; update mac_rag")
    try:
        return MACConfig.parse(values, path)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error


def _encoder(
    folder: Path, part: EncoderConfig, config: MACConfig, base_lm: BaseLM, index: Any, words: HashedWords | None
) -> TextEncoder:
    if part.quantization != "none":
        backbone = load_backbone(part, base_lm.device)
    else:
        backbone = empty_backbone(part, _architecture(folder))
    return make_encoder(config, part, backbone, load_tokenizer(str(folder)), base_lm, index, words)


def _index(folder: Path, part: IndexConfig, base_lm: BaseLM) -> Any:
    backbone = empty_backbone(EncoderConfig(design="encoder-only", name=part.name), _architecture(folder))
    return make_index(part, backbone, base_lm.tokenizer, base_lm)


def _architecture(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the architecture in {folder} cannot be read: {error}") from error


def _fill(model: MACModel, path: Path) -> None:
    """Copies stored weights into a model of exactly the same names and shapes."""
    try:
        stored = unpacked(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is missing, truncated or damaged: {error}") from error
    wanted = model.mac_state()
    differences = [
        f"{name}: {'missing in the file' if name not in stored else 'unknown to the model'}"
        for name in sorted(wanted.keys() ^ stored.keys())
    ] + [
        f"{name}: {list(stored[name].shape)} in the file, {list(wanted[name].shape)} in the model"
        for name in sorted(wanted.keys() & stored.keys())
        if stored[name].shape != wanted[name].shape
    ]
    if differences:
        shown = "\n  ".join(differences[:20])
        more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
        raise ModelLoadError(f"{path} does not match its configuration:\n  {shown}{more}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(stored[name])


def _save_base_lm(base_lm: BaseLM, folder: Path, dtype: torch.dtype | None) -> None:
    lm = merged(base_lm.model)
    base_lm.tokenizer.save_pretrained(folder)
    if dtype == torch.int8:
        lm.config.save_pretrained(folder)
        # Tied weights are one parameter, and stored once.
        save_file(_stored(dict(lm.named_parameters()), dtype), folder / PACKED_LM, metadata={"format": "pt"})
        return
    state = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in lm.state_dict().items()}
    with quiet():
        lm.save_pretrained(folder, state_dict=state)


def _stored(state: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    here = {name: tensor.detach().cpu() for name, tensor in state.items()}
    if dtype == torch.int8:
        return packed(here)
    return {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in here.items()}
