"""A cache of the networks that baselines train for minutes, beside the results.

The name of a file is a digest of everything that determines the weights. A changed recipe, LM or data set has another
name, so an outdated network is never loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import nn

from eval.harness.streams import locked
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


def load_or_train(network: nn.Module, folder: Path | None, name: str, train: Callable[[], object]) -> None:
    """Loads the weights of a network from a folder; if that does not hold them, trains it, and writes them there.

    An experiment waits for another that trains the same network. None for the folder always trains.

    Raises:
        ModelLoadError: if the file is damaged.
    """
    if folder is None:
        train()
        return
    path = folder / f"{name}.safetensors"
    with locked(path):
        if not path.exists():
            train()
            weights = {name: weight.detach().cpu().contiguous() for name, weight in network.state_dict().items()}
            write_file(path, [serialize(weights)])
            sync_folder(folder)
            return
    try:
        network.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelLoadError(f"{path} is damaged, delete it to train again: {error}") from None
