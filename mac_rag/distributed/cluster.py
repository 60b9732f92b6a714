"""The Ray cluster: an existing one, or a new one on this machine."""

from __future__ import annotations

import logging
import os
from secrets import token_hex
from types import ModuleType

from mac_rag.errors import ConfigError

_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_LOOPBACK = "127.0.0.1"


def connected_ray() -> ModuleType:
    """The module `ray`, connected to a cluster.

    An existing connection of this program is reused. Otherwise the environment variable `RAY_ADDRESS` names the cluster
    to join. Ray runs whatever reaches its ports, so this needs a token (`RAY_AUTH_TOKEN`), or the word that there
    is none (`RAY_AUTH_MODE=disabled`). Without an address, Ray starts on this machine for this process: it listens
    on the loopback address, takes only calls with a random token, has no dashboard and reports no usage.

    Raises:
        ConfigError: if Ray is missing, if the cluster cannot be reached, or if no token is given for it.
    """
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray starts
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # under `uv run`, Ray would copy the current folder
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("work on several processes needs Ray: pip install 'mac-rag[ray]'") from None
    if ray.is_initialized():
        return ray
    if not address:
        os.environ.pop("RAY_AUTH_MODE", None)  # then `ray.init` asks for tokens
        os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))  # Ray keeps a process's first one, also for later starts
    elif not any(os.environ.get(name) for name in _AUTHENTICATION):
        raise ConfigError(
            f"RAY_ADDRESS={address} names no token, and who reaches a cluster without tokens runs code on all of its "
            "machines; start it with RAY_AUTH_MODE=token, and set RAY_AUTH_TOKEN here, too; or set "
            "RAY_AUTH_MODE=disabled if nobody else reaches its network"
        )
    try:
        if address:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            _keep_to_this_machine()
            ray.init(
                "local",
                _node_ip_address=_LOOPBACK,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        place = f"the Ray cluster at RAY_ADDRESS={address}" if address else "Ray on this machine"
        raise ConfigError(f"{place} cannot be reached: {error}; start it, or unset RAY_ADDRESS") from error
    return ray


def _keep_to_this_machine() -> None:
    """Makes Ray listen on the loopback address.

    Ray replaces a given loopback address by another address of the machine, unless it believes that this system
    supports no clusters.
    """
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that Ray starts
