"""A cache of the networks that baselines train for minutes, beside the results.

The name of a file is a digest of everything that determines the weights. A changed recipe, LM or data set has another
name, so an outdated network is never loaded.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import nn

from mac_rag.atomic_files import sync_folder, write_file
from mac_rag.config import Config
from mac_rag.data.types import QADataset
from mac_rag.errors import ModelLoadError


def key(kind: str, lm: nn.Module, dataset: QADataset, config: Config, seed: int) -> str:
    """The key of a trained network: its kind, such as `camels`, and a digest of seed, recipe, LM and training data."""
    digest = hashlib.sha256(f"{seed}\n{config.model_dump_json()}\n".encode())
    for name, weight in lm.state_dict().items():
        digest.update(name.encode() + weight.detach().float().cpu().contiguous().numpy().tobytes())
    for document in dataset.documents:
        digest.update(document.text.encode() + b"\0")
    for question in dataset.questions:
        digest.update(f"{question.document_id}\0{question.question}\0{question.answers[0]}\0".encode())
    return f"{kind}-{digest.hexdigest()[:16]}"


def load(network: nn.Module, folder: Path | None, name: str) -> bool:
    """Loads the weights of a network from a folder; returns False if the folder does not hold it."""
    if folder is None or not (path := folder / f"{name}.safetensors").exists():
        return False
    try:
        network.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelLoadError(f"{path} is damaged, delete it to train again: {error}") from None
    return True


def save(network: nn.Module, folder: Path | None, name: str) -> None:
    """Writes the weights of a network into a folder; None writes nothing. The file is whole at any time."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in network.state_dict().items()}
    # Two experiments that run side by side may train the same network, and must not write one file at once.
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        write_file(folder / f"{name}.safetensors", [serialize(weights)])
        sync_folder(folder)
