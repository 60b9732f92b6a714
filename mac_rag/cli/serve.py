"""`mac-rag serve`, `mac-rag mcp` and `mac-rag key`: banks for programs in any language, and the keys to them."""

from __future__ import annotations

import json
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag import DEFAULT_MODEL
from mac_rag.cli.config_file import ConfigOption, PrintConfigOption, written_settings
from mac_rag.cli.options import DeviceMapOption, ModelOption
from mac_rag.cli.terminal import say
from mac_rag.errors import ConfigError

if TYPE_CHECKING:
    from mac_rag.server.keys import KeyStore
    from mac_rag.server.service import Limits, Service

# Of the environment variables that serve takes: MAC_RAG_SERVE_PORT and so on.
ENVIRONMENT = "MAC_RAG_SERVE"

keys = typer.Typer(no_args_is_help=True, help="Make, list and remove the keys of a server.")

_REPLICAS = 2

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
    typer.Option("--model-name", help="What the API calls the model.", show_default="its name, or that of its folder"),
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
        typer.Option("--no-keys", help="Let everybody who reaches the port do everything, also beyond this machine."),
    ] = False,
    pending: Annotated[int, typer.Option(min=1, help="Questions that wait or are answered at a time.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="The longest time for one question.")] = 60.0,
    requests_per_minute: Annotated[
        int, typer.Option(min=0, help="Requests a minute of one key; 0 for any number.")
    ] = 1_200,
    device_map: DeviceMapOption = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Answer in several processes, with Ray Serve: on the cluster at RAY_ADDRESS, or else on this machine. "
            "New banks are in shards.",
        ),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: processes that answer; new banks get as many shards.", show_default="2"),
    ] = None,
    config: ConfigOption = None,  # noqa: ARG001, what is in it has become the other arguments
    print_config: PrintConfigOption = False,
) -> None:
    """Serve banks over HTTP: an OpenAI-compatible API, a page at /, and MCP at /mcp.

    Without keys, the server listens on the loopback address only. Make keys with `mac-rag key add`. Ctrl-C or SIGTERM
    ends it after what has begun; documents that were acknowledged are on the disk.

    Every option can also come from the environment, as MAC_RAG_SERVE_PORT for --port, and from the file of --config.
    """
    if print_config:
        say(written_settings(context), lines=True)
        return
    _check_installed("fastapi", "uvicorn", "prometheus_client", "mcp")
    if replicas is not None and not ray:
        raise ConfigError(f"--replicas {replicas} is for --ray; add --ray, or leave it out")
    if device_map is not None and ray:
        raise ConfigError(f"--device-map {device_map} is for one process; leave it out, or --ray")
    from mac_rag.server.keys import KeyStore
    from mac_rag.server.service import KEYS, Limits

    has_keys = bool(KeyStore(data / KEYS))
    if not has_keys and not no_keys and not _is_loopback(host):
        raise ConfigError(
            f"without keys, everybody who reaches {host} could read and change all banks; make one with mac-rag key "
            f"add NAME --data {data}, listen on 127.0.0.1, or give --no-keys"
        )
    limits = Limits(pending=pending, question_seconds=seconds, requests_per_minute=requests_per_minute)
    service = _service(data, model, model_name, limits, device_map, (replicas or _REPLICAS) if ray else None)
    from mac_rag.server.app import run

    run(service, host=host, port=port, anyone=not has_keys, any_host=not _is_loopback(host))


def mcp(data: DataOption, model: ModelOption = DEFAULT_MODEL, device_map: DeviceMapOption = None) -> None:
    """Give an agent on this machine tools: remember, ask, forget, list and search, by MCP on standard input and output.

    It opens the banks of the folder itself, so no server may serve them meanwhile. A running server has the same tools
    at /mcp, by MCP's streamable HTTP.
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
        typer.Option(help="read asks; write also changes documents; admin also makes and deletes banks."),
    ] = "read",
    banks: Annotated[
        list[str] | None,
        typer.Option(
            "--bank", help="Bank that exists for it; * stands for any characters. Repeat it.", show_default="all"
        ),
    ] = None,
) -> None:
    """Make a key and print it. It is shown this once; the server keeps a hash of it."""
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
    """Remove a key. A running server refuses it from its next request on."""
    _store(data).remove(name)
    say(f"{name} is removed")


def _store(data: Path) -> KeyStore:
    from mac_rag.server.keys import KeyStore
    from mac_rag.server.service import KEYS

    return KeyStore(data / KEYS)


def _service(
    data: Path,
    model: str,
    name: str | None,
    limits: Limits | None,
    device_map: str | None,
    replicas: int | None = None,
) -> Service:
    from mac_rag.cli.models import load_model
    from mac_rag.server.service import BETWEEN_QUESTIONS, Service

    say("loading the model ...", err=True)
    # With --ray, a GPU is for the replicas.
    loaded = load_model(model, None, data, device=None if replicas is None else "cpu", device_map=device_map)
    started = None
    if replicas is not None and limits is not None:
        from mac_rag.server.replicas import Replicas

        started = Replicas(model, loaded, data, replicas, limits.pending, BETWEEN_QUESTIONS)
    return Service(data, loaded, name or Path(model).name.partition("@")[0], limits, started)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_installed(*modules: str) -> None:
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}: {sys.executable} -m pip install 'mac-rag[server]'")
