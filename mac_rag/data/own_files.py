"""The files of a user's own data set, and the splits that their names stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mac_rag.data.records import SUFFIXES, suffix_of
from mac_rag.data.typed_rows import HUB, hub_splits
from mac_rag.errors import DataError

_SPLIT_OF = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}
_FORMS = (
    "files named train, val and test, or documents beside questions, each ending in "
    + ", ".join(SUFFIXES)
    + "; or give "
    "one file"
)


@dataclass(frozen=True)
class Files:
    """The files of a data set.

    Attributes:
        corpus: the documents; None if they stand beside their questions.
        splits: the questions of each split, `train`, `val` and `test`; or `all`, a single file that is to be divided.
    """

    corpus: Path | None
    splits: Mapping[str, Path]


def find_files(path: str | Path) -> Files:
    """The files of a data set in one of these forms:

    - one file of rows with document, question and answers; or a file in SQuAD's layout;
    - a folder with such files named `train`, `val` (`validation`, `valid`, `dev`) and `test`, at least one of them;
    - a folder with `documents` or `corpus`, and `questions` or questions in files named as above;
    - a data set of the Hub, `hub:OWNER/NAME`, with splits named as above; or one split of it, `hub:OWNER/NAME:SPLIT`.

    Raises:
        DataError: for a path that is none of these.
    """
    if str(path).startswith(HUB):
        return _find_on_hub(str(path))
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"there is no {path}; give a file, a folder with {_FORMS}")
        split = _SPLIT_OF.get(_stem(path), "all")
        return Files(None, {split: path})
    try:
        inside = sorted(file for file in path.iterdir() if suffix_of(file) is not None and not file.is_dir())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    corpora = [file for file in inside if _stem(file) in ("documents", "corpus")]
    questions = [file for file in inside if _stem(file) == "questions"]
    splits = _by_split(path, [file for file in inside if _stem(file) in _SPLIT_OF])
    corpus = _one_of(path, corpora, "documents")
    asked = _one_of(path, questions, "questions")
    if asked is not None and splits:
        raise DataError(f"{path} holds {asked.name} and questions by splits; keep one of the two")
    if asked is not None and corpus is None:
        raise DataError(f"{path} holds {asked.name} without documents; put documents.jsonl beside it")
    found = {"all": asked} if asked is not None else splits
    if not found:
        names = ", ".join(file.name for file in inside) or "no such file"
        raise DataError(f"{path} has no questions; give {_FORMS} (it has {names:.400})")
    return Files(corpus, found)


def _find_on_hub(name: str) -> Files:
    if ":" in name.removeprefix(HUB):
        return Files(None, {"all": Path(name)})
    names = hub_splits(name)
    if len(names) == 1:
        return Files(None, {"all": Path(f"{name}:{names[0]}")})
    known = [split for split in names if split in _SPLIT_OF]
    if not known:
        raise DataError(
            f"{name} has the splits {', '.join(names):.400}; name one of them, such as {name}:{names[0]:.80}"
        )
    return Files(None, {_SPLIT_OF[split]: Path(f"{name}:{split}") for split in known})


def _by_split(folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    by_split = {
        split: [file for file in files if _SPLIT_OF[_stem(file)] == split] for split in ("train", "val", "test")
    }
    chosen = {split: _one_of(folder, found, f"the split {split}") for split, found in by_split.items()}
    return {split: file for split, file in chosen.items() if file is not None}


def _one_of(folder: Path, files: list[Path], what: str) -> Path | None:
    if len(files) > 1:
        raise DataError(f"{folder} holds {what} twice, in {files[0].name} and {files[1].name}; keep one of them")
    return files[0] if files else None


def _stem(file: Path) -> str:
    return file.name.removesuffix(suffix_of(file) or "")
