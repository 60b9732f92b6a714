"""Which commit of a repository on the Hub is used: all parts of a model come from one, and the user learns which."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path

from transformers.utils.hub import cached_file

from mac_rag.lm.model_folders import check_files

_COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/")


def split_revision(place: str) -> tuple[str, str | None]:
    """Name and revision of `NAME@REVISION`; a folder, or a name without `@`, has no revision."""
    if Path(place).is_dir():
        return place, None
    name, _, revision = place.partition("@")
    return name, revision or None


def pinned(name: str, revision: str | None) -> str | None:
    """The commit that a name on the Hub stands for, the same one until the process ends.

    Where nobody has chosen a revision, a warning tells the commit. The files that name code are checked on the way.

    Args:
        name: repository on the Hub, or a folder, which has no revision.
        revision: branch, tag or commit; None for the newest commit.

    Returns:
        The commit; `revision` itself for a folder, or where the Hub and its cache know nothing.

    Raises:
        ModelLoadError: as `mac_rag.lm.model_folders.check_files`.
    """
    return revision if Path(name).exists() else _pinned(name, revision)


@cache
def _pinned(name: str, revision: str | None) -> str | None:
    commit = revision
    for file in ("config.json", "tokenizer_config.json"):
        try:
            path = cached_file(name, file, revision=commit)
        except (OSError, ValueError):  # whoever loads the model says what is wrong
            continue
        check_files([Path(str(path))])
        match = _SNAPSHOT.search(Path(str(path)).as_posix())
        commit = match[1] if match else commit
    if revision is None and commit is not None:
        warn_unpinned(name, commit)
    return commit


def warn_unpinned(name: str, commit: str) -> None:
    """Tells which commit is used of a repository for which no revision was chosen."""
    warnings.warn(
        f"no revision was given for {name}, so commit {commit} is used, the newest that is known here; to stay with "
        f"it, give it as the revision (in a configuration, `revision`; in the name of an encoder, {name}@{commit})",
        UserWarning,
        stacklevel=3,
    )


def is_commit(revision: str | None) -> bool:
    """True for a revision that can never mean anything else."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None
