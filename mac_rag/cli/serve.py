"""`mac-rag serve`, `mac-rag mcp` and `mac-rag key`: banks for programs in any language, and the keys to them.

Options also come from a YAML file and from environment variables. The command line overrides the environment, the
environment overrides the file, and the file overrides the defaults.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from mac_rag.cli.options import DeviceMapOption, ModelOption
from mac_rag.cli.terminal import say
from mac_rag.errors import ConfigError
from mac_rag.shipped_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from mac_rag.server.keys import KeyStore
    from mac_rag.server.service import Limits, Service

# Prefix of the environment variables that serve takes: MAC_RAG_SERVE_PORT and so on.
ENVIRONMENT = "MAC_RAG_SERVE"

keys = typer.Typer(no_args_is_help=True, help="Make, list and remove the keys of a server.")

DataOption = Annotated[
    Path,
    typer.Option(
        "--data",
        help="Folder of the server: banks, backups, keys, audit log.",
        envvar=f"{ENVIRONMENT}_DATA",
        file_okay=False,
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--model-name", help="The API's name of the model.", show_default="its name, or that of its folder"),
]


def serve(
    context: typer.Context,
    data: DataOption,
    model: ModelOption = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for a free one.")] = 8080,
    model_name: NameOption = None,
    no_keys: Annotated[
        bool,
        typer.Option("--no-keys", help="Let everybody who reaches the port do everything, also from other machines."),
    ] = False,
    pending: Annotated[int, typer.Option(min=1, help="Most questions that wait or are answered at a time.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Longest time for one question, in seconds.")] = 60.0,
    requests_per_minute: Annotated[
        int, typer.Option(min=0, help="Most requests a minute of one key; 0 for any number.")
    ] = 1_200,
    allow_origin: Annotated[
        str | None,
        typer.Option(
            help="Origins of other sites whose pages may use the server (CORS), such as https://app.example.org, with "
            "spaces between them.",
            show_default="none",
        ),
    ] = None,
    device_map: DeviceMapOption = None,
    config: ConfigOption = None,  # noqa: ARG001, its values have become the defaults of the other arguments
    print_config: PrintConfigOption = False,
) -> None:
    """Serve banks over HTTP: an OpenAI-compatible API, a page at /, and MCP at /mcp.

    Without keys, the server listens on the loopback address only. Make keys with `mac-rag key add`. Ctrl-C or SIGTERM
    ends the server after it has finished running work; documents that were acknowledged are on the disk.

    Every option can also come from the environment, such as MAC_RAG_SERVE_PORT for --port, and from the file of
    --config.
    """
    if print_config:
        say(written_settings(context), lines=True)
        return
    _check_installed("fastapi", "uvicorn", "prometheus_client", "mcp")
    from mac_rag.server.app import Access, is_loopback, run
    from mac_rag.server.service import Limits

    has_keys = _store(data).was_used
    if has_keys and no_keys:
        raise ConfigError(
            f"{data} has had keys, so it is not served without: leave --no-keys out, or give another folder"
        )
    if not has_keys and not no_keys and not is_loopback(host):
        raise ConfigError(
            f"without keys, everybody who reaches {host} could read and change all banks; make one with mac-rag key "
            f"add NAME --data {data}, listen on 127.0.0.1, or give --no-keys"
        )
    if has_keys and not _store(data).described():
        say(f"no key is left, so nobody is let in: mac-rag key add NAME --data {data}", err=True)
    limits = Limits(pending=pending, question_seconds=seconds, requests_per_minute=requests_per_minute)
    service = _service(data, model, model_name, limits, device_map)
    access = Access(not has_keys, not is_loopback(host), (allow_origin or "").split())
    run(service, host=host, port=port, access=access)


def mcp(data: DataOption, model: ModelOption = DEFAULT_MODEL, device_map: DeviceMapOption = None) -> None:
    """Give an agent on this machine tools: remember, ask, forget, list and search, by MCP on standard input and output.

    The command opens the banks of the folder itself, so no server may serve them meanwhile. A running server has the
    same tools at /mcp, by MCP's streamable HTTP.
    """
    _check_installed("mcp", "prometheus_client")
    service = _service(data, model, None, None, device_map)
    from mac_rag.server.mcp_tools import run_on_standard_input

    run_on_standard_input(service)


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the key, for logs and `remove`.")],
    data: DataOption,
    scope: Annotated[
        Literal["read", "write", "admin"],
        typer.Option(help="read: ask; write: also change documents; admin: also make and delete banks."),
    ] = "read",
    banks: Annotated[
        list[str] | None,
        typer.Option(
            "--bank",
            help="A bank that the key may see; * stands for any characters. Repeat it for several banks.",
            show_default="all",
        ),
    ] = None,
) -> None:
    """Make a key and print it. It is shown only now; the server stores a hash of it."""
    say(_store(data).add(name, scope, banks or ["*"]))


@keys.command("list")
def list_keys(data: DataOption) -> None:
    """List the keys: one JSON object per line, without the keys themselves."""
    for record in _store(data).described():
        say(json.dumps(record))


@keys.command()
def remove(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    data: DataOption,
) -> None:
    """Remove a key. A running server refuses it from the next request on."""
    _store(data).remove(name)
    say(f"{name} is removed")


def _store(data: Path) -> KeyStore:
    from mac_rag.server.keys import KeyStore
    from mac_rag.server.service import KEYS

    return KeyStore(data / KEYS)


def _service(data: Path, model: str, name: str | None, limits: Limits | None, device_map: str | None) -> Service:
    from mac_rag.cli.models import load_model
    from mac_rag.server.service import Service

    say("loading the model ...", err=True)
    loaded = load_model(model, None, data, device_map=device_map)
    return Service(data, loaded, name or Path(model).name.partition("@")[0], limits)


def _check_installed(*modules: str) -> None:
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}: {sys.executable} -m pip install 'mac-rag[server]'")


# Type of an option -> the types of its value in YAML, and a word for messages.
_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    Path: ((str,), "a path"),
}
_SOURCES = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def _take_file(context: typer.Context, file: Path | None) -> Path | None:
    """Makes a file's values the defaults of all options. Typer calls it before it reads the other options."""
    _check_environment(context)
    if file is not None:
        context.default_map = _read(file, context)
    return file


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of options, with _ for - in their names; the command line and the environment override it.",
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
        help="Print all options with their effective values, as such a file, and end.",
        allow_from_autoenv=False,
    ),
]
_NO_SETTINGS = ("config", "print_config", "help")


def written_settings(context: typer.Context) -> str:
    """The effective values of all options, as a YAML file that says where each value comes from."""
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
    """Refuses environment variables that have the prefix and name no option, and values that their option refuses."""
    prefix = f"{context.auto_envvar_prefix}_"
    known = {prefix + name.upper(): name for name in (*_settings(context), "config")}
    variables = sorted(name for name in os.environ if name.startswith(prefix) and os.environ[name])
    unknown = [name for name in variables if name not in known]
    if unknown:
        raise ConfigError(
            f"the environment variable {unknown[0]} is no option of mac-rag {context.info_name}"
            f"{_near(unknown[0], known)}; mac-rag {context.info_name} --help lists them"
        )
    for variable in variables:
        if known[variable] != "config":
            _check_value(context, known[variable], os.environ[variable], variable)


def _read(file: Path, context: typer.Context) -> dict[str, Any]:
    """The values of a file, each checked like the option on the command line.

    Raises:
        ConfigError: for a file that cannot be read, or is not a mapping of options to values of their types.
    """
    from mac_rag.strict_yaml import read_yaml

    values = read_yaml(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no options; write one per line, such as port: 8080")
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
    """Refuses a value that the option would refuse on the command line."""
    [option] = (option for option in context.command.get_params(context) if option.name == name)
    try:
        option.process_value(context, value)
    except typer.BadParameter as error:
        raise ConfigError(f"{where}: {error.message} (got {value!r:.100})") from None


def _check_type(value: Any, hint: Any, where: str) -> bool:
    """Refuses a value that has not its option's type; returns False for null if that is the option's default."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in choices:
        return False
    types, name = _KINDS[next(choice for choice in choices if choice is not type(None))]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(f"{where} takes {name}, not {value!r:.100}")
    return True


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name.replace("-", "_"), known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
