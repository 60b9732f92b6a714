"""YAML within bounds: plain values only, no key twice, no alias that makes a small file large."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mac_rag.errors import ConfigError
from mac_rag.untrusted_files import DEPTH, NUMBER, MalformedError, read_text_bytes

# Values of a file after every alias is written out. Recipes have some hundreds.
_MOST_VALUES = 20_000
_LARGEST = 64 << 10  # bytes of a file; the parser needs a second for one of these


def read_yaml(path: Path) -> Any:
    """The value in a YAML file.

    Raises:
        ConfigError: for a file that cannot be read, or is larger than 64 KiB; for ill-formed YAML, or a key that comes
            twice.
    """
    try:
        return parse_yaml(read_text_bytes(path, _LARGEST, follow=True).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: not UTF-8 at byte {error.start:,}") from None
    except MalformedError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def parse_yaml(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        MalformedError: for ill-formed YAML, a key that comes twice, a value that is no text, number, truth value, null,
            list or mapping, or more values or deeper nesting than any file of ours has; says where.
    """
    _check_brackets(text)
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, 0)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:  # its text quotes the file, in which there may be what is not to be shown
        raise MalformedError(f"{error.problem or error.context}{_place(error.problem_mark)}") from None
    except yaml.YAMLError as error:
        raise MalformedError(str(error)) from None
    except RecursionError:
        raise MalformedError(f"nested more than {DEPTH} deep") from None
    except (ValueError, OverflowError) as error:  # a date or a number that there is not
        raise MalformedError(str(error)) from None


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f", line {mark.line + 1:,}, column {mark.column + 1:,}"


def _check_brackets(text: str) -> None:
    """Refuses deep nesting before the parser meets it, which needs minutes for it."""
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > DEPTH:
            raise MalformedError(f"nested more than {DEPTH} deep, character {bracket.start():,}")


def _count(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """The number of values below a node, those of aliases included.

    `counted`: numbers of the nodes that were counted before, by identity; 0 while one is being counted.
    """
    known = counted.get(id(node))
    if known is not None:
        if known == 0:
            raise MalformedError(f"an alias that refers to itself{_place(node.start_mark)}")
        return known
    if depth > DEPTH:
        raise MalformedError(f"nested more than {DEPTH} deep{_place(node.start_mark)}")
    counted[id(node)], total = 0, 1
    for part in _parts(node):
        total += _count(part, counted, depth + 1)
        if total > _MOST_VALUES:
            raise MalformedError(f"more than {_MOST_VALUES:,} values, with aliases written out")
    counted[id(node)] = total
    return total


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


class _StrictLoader(yaml.SafeLoader):
    """Raises an error for a key that occurs twice in one mapping; YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key is a list or a mapping", key.start_mark)
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} comes twice", key.start_mark)
            seen.add(key.value)
        return node

    def construct_yaml_int(self, node: Any) -> int:
        digits = len(node.value.lstrip("+-"))
        if digits > NUMBER:
            raise MalformedError(f"a number of {digits:,} digits{_place(node.start_mark)}")
        return super().construct_yaml_int(node)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
