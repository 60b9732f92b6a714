"""Mutations of files: of their bytes, of what they say, and of what kind of file they are.

A sealed mutation has all checksums that fit it, as those of an attacker or of a faulty writer have; an unsealed one has
none that does, as those of a faulty disk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from mac_rag.errors import MACError
from tests.torture.part import Part

DEEP = 100_000
# JSON that is written as it stands, because no value of Python's is written like it.
RAW = (
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "9" * 5_000,
    "1e999",
    "NaN",
    "-Infinity",
    '{"a":1,"a":2}',
    '"\\ud800"',
    "",
    "[" * 70 + "]" * 70,
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 1 << 15, 1 << 16, 1 << 31, 1 << 32, 1 << 47, 1 << 62, 1 << 63, 1 << 64,
    1 << 80, -(1 << 63), 0.5, -0.0, 1e308, "", "a", "0", "\0", "../../etc/passwd", "x" * 10_000, [], {}, [1], [[]],
    [None], ["a"], {"a": 1}, [0] * 1000, [1, 2, 3], "segment-0123456789abcdef", "0" * 64,
)  # fmt: skip
KINDS = ("nothing", "folder", "pipe", "link", "loop", "empty", "hole", "device")
MEMORY = 100 << 20
Way: TypeAlias = Callable[[Path, random.Random], str]  # damages a folder, and says how


class Mutations(Part):
    """Damages copies of folders and uses them as a user does; anything but success or a MACError is a failure."""

    def __init__(self, place: Path) -> None:
        self._examples, self._copy = self.make(place / "examples"), place / "copy"

    @abstractmethod
    def make(self, place: Path) -> list[Path]:
        """Writes undamaged examples, and returns their folders."""

    @abstractmethod
    def ways(self, folder: Path, *, sealed: bool) -> Sequence[Way]:
        """The ways to damage a folder; none where it has no checksums that could be made to fit."""

    @abstractmethod
    def check(self, folder: Path) -> None:
        """Uses a folder as a user does."""

    def _drawn(self, seed: int) -> tuple[Path, Sequence[Way], bool]:
        """The folder to damage, the ways to do so, and whether they are sealed."""
        example = self._examples[seed // 2 % len(self._examples)]
        sealed = self.ways(example, sealed=True) if seed % 2 else ()
        return example, sealed or self.ways(example, sealed=False), bool(sealed)

    def kind(self, seed: int) -> str:
        return "sealed" if self._drawn(seed)[2] else "unsealed"

    def trial(self, seed: int) -> None:
        example, ways, _ = self._drawn(seed)
        folder, rng = copy(example, self._copy), random.Random(seed)
        way = rng.choice(ways)
        how = f"{way.__name__}: {way(folder, rng)}"
        try:
            self.check(folder)
        except BaseException as error:
            error.add_note(f"seed {seed}: {how}")
            raise


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One random change of some bytes."""
    content, place = bytearray(data), rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return bytes(content[:place])
        case 1 | 2 if place < len(content):
            content[place] ^= 1 << rng.randrange(8)
        case 3:
            content[place:place] = rng.randbytes(rng.randrange(1, 40))
        case 4:
            content[place : place + rng.randrange(1, 200)] = b""
        case 5:
            content[place : place + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\0\0\x7f", b"[" * 8, b'"' * 8])
        case 6:
            content += rng.randbytes(rng.randrange(1, 100))
        case _:
            content[place:place] = content[place : place + rng.randrange(1, 300)]
    return bytes(content)


def mutate_json(value: Any, rng: random.Random) -> str:
    """JSON like `value`, in which one place, chosen at random, says something else."""
    content = json.loads(json.dumps(value))
    places = list(_places(content))
    container, key = rng.choice(places) if places else ([content], 0)
    mark = "a place for raw JSON"
    action = rng.randrange(6)
    if action == 0 and isinstance(container, dict):
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container["unknown"] = container[key]
    elif action == 2 and isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), container[key])
    elif action == 3:
        container[key] = mark
    elif action == 4 and isinstance(container[key], int):
        container[key] += rng.choice([-1, 1, 8, -8, 1 << 16, 1 << 47])
    else:
        container[key] = rng.choice(VALUES)
    return json.dumps(content, separators=(",", ":")).replace(json.dumps(mark), rng.choice(RAW))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def replace_file(path: Path, kind: str) -> None:
    """Puts something else in the place of a file: no file, another kind of file, or one as long as no file can be."""
    data = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        aside = path.with_name(f"{path.name}.aside")
        aside.write_bytes(data)
        path.symlink_to(aside.name)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "hole":
        path.write_bytes(data)
        os.truncate(path, 1 << 40)


def damage_bytes(folder: Path, rng: random.Random) -> str:
    """Damages some bytes of a file; names the file."""
    path = rng.choice(files_of(folder))
    path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    return str(path.relative_to(folder))


def damage_kind(folder: Path, rng: random.Random) -> str:
    """Puts something else in the place of a file; names the file and what it is now."""
    path, kind = rng.choice(files_of(folder)), rng.choice(KINDS)
    replace_file(path, kind)
    return f"{path.relative_to(folder)} became {kind}"


def damage_json(folder: Path, rng: random.Random) -> str:
    """Lets a JSON file, or a line of one, say something else; names the file."""
    path = rng.choice([file for file in files_of(folder) if file.suffix in (".json", ".jsonl")])
    lines = path.read_bytes().splitlines()
    number = rng.randrange(len(lines))
    lines[number] = mutate_json(json.loads(lines[number]), rng).encode()
    path.write_bytes(b"".join(line + b"\n" for line in lines) if path.suffix == ".jsonl" else b"\n".join(lines))
    return f"{path.relative_to(folder)}: {lines[number][:200]!r}"


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def refusal(use: Callable[[], object]) -> str | None:
    """The message of the MACError that refuses a use; None if nothing refuses it."""
    try:
        use()
    except MACError as error:
        return str(error)
    return None


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails if Python's objects need more than a bad file may cost."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY, f"{peak:,} bytes"


def copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
