"""The commit of a Hub repository: all parts of a model come from the same one, and a warning names it."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path

from transformers.utils.hub import cached_file

from mac_rag.lm.model_folders import ADAPTER, LARGEST_JSON, check_files, check_folder
from mac_rag.untrusted_files import read_json

_COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/")

_CHECKED = ("config.json", "tokenizer_config.json", ADAPTER)  # what can name code, or another model


def split_revision(place: str) -> tuple[str, str | None]:
    """Name and revision of `NAME@REVISION`; a folder, or a name without `@`, has no revision."""
    if Path(place).is_dir():
        return place, None
    name, _, revision = place.partition("@")
    return name, revision or None


def pinned(name: str, revision: str | None) -> str | None:
    """The commit that a name on the Hub stands for; it stays the same until the process ends.

    If no revision is chosen, a warning names the commit. The files that could name code, or another model, are checked.

    Args:
        name: repository on the Hub, or a folder, which has no revision.
        revision: branch, tag or commit; None for the newest commit.

    Returns:
        The commit; `revision` itself for a folder, or if neither the Hub nor its cache knows the repository.

    Raises:
        ModelLoadError: as `mac_rag.lm.model_folders.check_files`.
    """
    return revision if Path(name).exists() else _pinned(name, revision)


@cache
def _pinned(name: str, revision: str | None) -> str | None:
    commit = revision
    for file in _CHECKED:
        path = cached_path(name, file, commit)
        if path is None:
            continue
        check_files([path])
        match = _SNAPSHOT.search(path.as_posix())
        commit = match[1] if match else commit
    if revision is None and commit is not None:
        warn_unpinned(name, commit)
    return commit


def cached_path(name: str, file: str, revision: str | None) -> Path | None:
    """The path on disk of a model's file, which is downloaded if necessary.

    Args:
        name: repository on the Hub, or a folder.
        file: the file's path in it.
        revision: revision of a repository.

    Returns:
        The path; None if there is no such file, or if neither the Hub nor its cache knows the repository.
    """
    try:
        path = cached_file(name, file, revision=revision)
    except (OSError, ValueError):  # loading the model reports the error
        return None
    return None if path is None else Path(path)


def check_modules(name: str, revision: str | None) -> None:
    """Checks the folders in which sentence-transformers stores the parts of a model.

    Args:
        name: repository on the Hub, or a folder.
        revision: as `pinned` returned it.

    Raises:
        ModelLoadError: as `mac_rag.lm.model_folders.check_files`.
    """
    if Path(name).exists():
        for folder in (path for path in sorted(Path(name).glob("*")) if path.is_dir()):
            check_folder(folder)
        return
    path = cached_path(name, "modules.json", revision)
    if path is None:
        return
    check_files([path])
    for module in read_json(path, LARGEST_JSON, follow=True):
        if module.get("path"):
            files = (cached_path(name, f"{module['path']}/{file}", revision) for file in _CHECKED)
            check_files(file for file in files if file is not None)


def warn_unpinned(name: str, commit: str) -> None:
    """Warns which commit of a repository is used because no revision was chosen."""
    warnings.warn(
        f"no revision was given for {name}, so commit {commit} is used, the newest one known here; to keep it, give it "
        f"as the revision (in a configuration, `revision`; in the name of an encoder, {name}@{commit})",
        UserWarning,
        stacklevel=3,
    )


def is_commit(revision: str | None) -> bool:
    """True for a full commit hash, the only revision that can never move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None
