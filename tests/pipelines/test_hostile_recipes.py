"""Recipes that are small as files and large as values, or no recipes at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_rag.errors import ConfigError
from mac_rag.strict_yaml import parse_yaml
from mac_rag.untrusted_files import MalformedError
from pipelines.stages import read_mapping
from tests.torture.mutations import little_memory

BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in zip("abcdefghij", "bcdefghijk")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 20,000 values, with aliases written out"),
        ("a: &a [*a]", "an alias that refers to itself"),
        ("[" * 50_000, "nested more than 72 deep"),
        ("a: " + "[" * 100 + "]" * 100, "nested more than 72 deep"),
        ("a: " + "9" * 5_000, "a number of 5,000 digits"),
        ("a: 2001-99-99", "month must be"),
        ("? [1, 2]\n: 3", "a key is a list or a mapping"),
        ("a: 1\na: 2", "the key 'a' comes twice"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: \0", "NUL"),
        ("x" * (65 << 10), "65,536 are the most"),
        ("- 1", "holds no recipe, but"),
    ],
    ids="bomb loop open deep digits date key twice code nul large list".split(),
)
def test_recipes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with little_memory(), pytest.raises(ConfigError, match=message) as error:
        read_mapping(path)
    assert str(path) in str(error.value)


def test_aliases_are_fine_within_bounds() -> None:
    assert parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: *a}") == {"a": {"b": 1}, "c": {"b": 1, "d": {"b": 1}}}
    assert parse_yaml("") is None
    with pytest.raises(MalformedError, match="mapping values are not allowed here"):
        parse_yaml("a: b: c")
