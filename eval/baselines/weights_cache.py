"""Networks that a baseline needs and that take minutes to train: kept beside the results, found by what they are.

A file is named by a digest of all that determines the weights: a changed recipe, LM or data set never meets old ones.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from mac_rag.errors import ModelLoadError

if TYPE_CHECKING:
    from mac_rag.config import Config
    from mac_rag.data.types import QADataset


def key(kind: str, lm: nn.Module, dataset: QADataset, config: Config, seed: int) -> str:
    """The name of a network of this kind, trained for an LM on a data set."""
    digest = hashlib.sha256(f"{seed}\n{config.model_dump_json()}\n".encode())
    for name, weight in lm.state_dict().items():
        digest.update(name.encode() + weight.detach().float().cpu().contiguous().numpy().tobytes())
    for document in dataset.documents:
        digest.update(document.text.encode() + b"\0")
    for question in dataset.questions:
        digest.update(f"{question.document_id}\0{question.question}\0{question.answers[0]}\0".encode())
    return f"{kind}-{digest.hexdigest()[:16]}"


def load(network: nn.Module, folder: Path | None, name: str) -> bool:
    """Fills a network from a folder; False where it is not there.

    Raises:
        ModelLoadError: for a file that is damaged.
    """
    if folder is None or not (path := folder / f"{name}.safetensors").exists():
        return False
    try:
        network.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelLoadError(f"{path} is damaged, delete it to train again: {error}") from None
    return True


def save(network: nn.Module, folder: Path | None, name: str) -> None:
    """Keeps a network in a folder; the file is either whole or not there."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    save_file({name: weight.detach().cpu().contiguous() for name, weight in network.state_dict().items()}, partial)
    partial.replace(path)
