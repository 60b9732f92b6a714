"""Files of documents, data sets and recipes, as text and as structure."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

from mac_rag.data.own import read_own
from mac_rag.data.readers import read_documents
from mac_rag.data.squad import read_official
from mac_rag.data.table import read_table
from pipelines.recipe import load_recipe, read_recipe
from pipelines.stages import RECIPES, read_stages
from pipelines.tasks.train_config import TrainConfig
from tests.torture.mutations import (
    KINDS,
    RAW,
    Mutations,
    Way,
    files_of,
    mutate_bytes,
    mutate_json,
    refusal,
    replace_file,
)

_ROWS = [{"id": str(number), "text": f"text {number}", "year": 2004, "tags": ["a", {"b": 1.5}]} for number in range(4)]
_ARTICLE = {
    "title": "Bridges",
    "paragraphs": [
        {"context": "A bridge.", "qas": [{"id": "1", "question": "What?", "answers": [{"text": "bridge"}]}]}
    ],
}
_ASKED = [
    {"id": number, "document": f"text {number // 2}", "question": "What?", "answers": ["text", "a text"], "title": "T"}
    for number in range(4)
]
_BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in zip("abcdefghij", "bcdefghijk")
)
# Text that costs a parser more than it looks.
_TEXTS = (
    *RAW, _BOMB, "a: &a [*a]", "? [1, 2]\n: 3", "a: 2001-99-99", "a: !!python/object/apply:os.system [id]",
    "<<: *missing", "a: &a {b: 1}\nc: {<<: [*a, *a], <<: *a}", "- " * 5_000, "1: 2\nb: 3", "a: " + "9" * 5_000,
    "stages: {x: {task: train, 1: 2}}\n1: 2\nb: 3", 'id,text\n"' + "x" * 5_000_000, "id,text\n" + "," * 1_000_000,
    "id,text\n" + '"\n' * 100_000, "id,id,text\n1,2,3\n", "\0" * 1_000, "\ufeffid,text\r\n1,a\r\n",
    "id,text\n1,a\x00b\n", '{"id": "1", "text": ' + "[[],[{}]," * 300_000, "\u2028" * 100, "\r" * 1_000,
    "x" * (9 << 20),
)  # fmt: skip


class Torture(Mutations):
    """A file of every kind that is read. None has checksums."""

    def make(self, place: Path) -> list[Path]:
        folder = place / "data"
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
        (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _ASKED))
        (folder / "asked.csv").write_text("document,question,answers\n" + 'A text.,What?,"[""text""]"\n' * 4)
        (folder / "rows.csv").write_text("id,text,note\n" + "".join(f'{n},"text ""{n}""\nmore",\n' for n in range(4)))
        (folder / "note.md").write_text("# A note\n\nA text.\n")
        (folder / "squad.json").write_text(json.dumps({"data": [_ARTICLE]}))
        (folder / "squad.json.gz").write_bytes(gzip.compress(json.dumps({"data": [_ARTICLE]}).encode()))
        (folder / "pipeline.yaml").write_bytes((RECIPES / "mac-tiny" / "pipeline.yaml").read_bytes())
        (folder / "train.yaml").write_text(json.dumps({"task": "train", **read_recipe("mac-tiny/train", None).values}))
        return [folder]

    def ways(self, folder: Path, *, sealed: bool) -> Sequence[Way]:
        return [] if sealed else [_any]

    def check(self, folder: Path) -> None:
        """Reads every file with its reader; a refusal names the file."""
        for path in sorted(folder.iterdir()):
            refused = refusal(lambda path=path: _read(path))
            assert refused is None or path.name in refused, refused
            assert refused is None or len(refused) < 20_000


def _any(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files_of(folder))
    match rng.randrange(5):
        case 0:
            kind = rng.choice(KINDS)
            replace_file(path, kind)
            return f"{path.name} became {kind}"
        case 1:
            text = rng.choice(_TEXTS)
            data = text.encode(errors="surrogatepass")
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
            return f"{path.name}: {text[:200]!r}"
        case 2:
            path = folder / rng.choice(["rows.jsonl", "asked.jsonl", "train.yaml", "squad.json"])
            rows = _ASKED if path.name == "asked.jsonl" else _ROWS
            value = {"data": [_ARTICLE]} if path.name == "squad.json" else rng.choice(rows)
            text = mutate_json(json.loads(path.read_text()) if path.name == "train.yaml" else value, rng)
            path.write_text(text)
            return f"{path.name}: {text[:200]!r}"
        case _:
            path.write_bytes(mutate_bytes(path.read_bytes(), rng))
            return path.name


def _read(path: Path) -> None:
    match path.suffix:
        case ".jsonl" | ".csv" if path.stem == "asked":
            read_own(path, "all")
        case ".gz" | ".json":
            list(read_official(path))
            read_own(path, "all")
        case ".yaml" if path.name == "train.yaml":
            load_recipe(TrainConfig, str(path), None)
        case ".yaml":
            read_stages(path)
        case ".csv":
            list(read_table(path, ("id", "text")))
            read_documents([path])
        case _:
            for document in read_documents([path]):
                assert isinstance(document.text, str)
                assert isinstance(document.id, str)
