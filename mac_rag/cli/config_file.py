"""Options of a command that runs unattended: from one YAML file and from environment variables.

The command line counts before the environment, the environment before the file, and the file before the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from mac_rag.errors import ConfigError

# What a value may be in YAML, by the type of the option.
_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    Path: ((str,), "a path"),
}
_SOURCES = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def _take_file(context: typer.Context, file: Path | None) -> Path | None:
    """Makes a file's values the defaults of all options; runs before any of them is read."""
    _check_environment(context)
    if file is not None:
        context.default_map = _read(file, context)
    return file


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of options, by their names with _ for -; the command line and the environment count before it.",
        callback=_take_file,
        is_eager=True,
        dir_okay=False,
        show_default="none",
    ),
]
PrintConfigOption = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print all options as they would count, as such a file, and end.",
        allow_from_autoenv=False,
    ),
]
_NO_SETTINGS = ("config", "print_config", "help")


def written_settings(context: typer.Context) -> str:
    """All options as they count, as a YAML file that says where each is from."""
    from yaml import safe_dump

    lines = []
    for name in _settings(context):
        value = context.params[name]
        line = safe_dump({name: str(value) if isinstance(value, Path) else value}, width=10_000).strip()
        source = context.get_parameter_source(name)
        lines.append(f"{line}  # {_SOURCES.get('' if source is None else source.name, 'default')}")
    return "\n".join(lines)


def _settings(context: typer.Context) -> list[str]:
    names = (str(parameter.name) for parameter in context.command.get_params(context))
    return [name for name in names if name not in _NO_SETTINGS]


def _check_environment(context: typer.Context) -> None:
    """Refuses variables that look like an option's and are none, and values that no option takes."""
    prefix = f"{context.auto_envvar_prefix}_"
    known = {prefix + name.upper(): name for name in (*_settings(context), "config")}
    given = sorted(name for name in os.environ if name.startswith(prefix) and os.environ[name])
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(
            f"the environment variable {unknown[0]} is no option of mac-rag {context.info_name}"
            f"{_near(unknown[0], known)}; mac-rag {context.info_name} --help lists them"
        )
    for variable in given:
        if known[variable] != "config":
            _check_value(context, known[variable], os.environ[variable], variable)


def _read(file: Path, context: typer.Context) -> dict[str, Any]:
    """The values of a file, each checked as its option on the command line is.

    Raises:
        ConfigError: for a file that cannot be read, or is no mapping of options to values of their types.
    """
    from mac_rag.strict_yaml import read_yaml

    values = read_yaml(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no options; write one a line, such as port: 8080")
    known = _settings(context)
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise ConfigError(
            f"{file}: {unknown[0]!r:.100} is no option of mac-rag {context.info_name}{_near(unknown[0], known)}; "
            f"it takes {', '.join(known)}"
        )
    hints = get_type_hints(context.command.callback)
    for name, value in values.items():
        if _check_type(value, hints[name], f"{file}: {name}"):
            _check_value(context, name, value, f"{file}: {name}")
    return values


def _check_value(context: typer.Context, name: str, value: Any, where: str) -> None:
    """Refuses what the option would refuse on the command line."""
    [option] = (option for option in context.command.get_params(context) if option.name == name)
    try:
        option.process_value(context, value)
    except typer.BadParameter as error:
        raise ConfigError(f"{where}: {error.message} (got {value!r:.100})") from None


def _check_type(value: Any, hint: Any, where: str) -> bool:
    """Refuses a value of another type than an option's; returns False for null where that is the default."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in choices:
        return False
    types, name = _KINDS[next(choice for choice in choices if choice is not type(None))]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(f"{where} takes {name}, and not {value!r:.100}")
    return True


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name.replace("-", "_"), known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
