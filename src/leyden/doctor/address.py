"""Where the rehearsal's gateway listens: on loopback, or for a cluster where pods reach it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from leyden.config import RunConfig
from leyden.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104  (told apart, not bound)


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """An address to listen on, and the host of the URL that pods are told (None: that address itself)."""

    host: str = "127.0.0.1"
    port: int = 0
    pods_host: str | None = None

    def url(self, port: int) -> str:
        """For pods, where the gateway listens on `port`."""
        host = self.pods_host or self.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def gateway_address(config: RunConfig, own_address: str) -> GatewayAddress:
    """`own_address` is this machine's, or this pod's, as the cluster sees it.

    A run that starts its gateway itself starts it here, and the rehearsal listens just there. Where one runs
    already, the rehearsal listens beside it, on the port that pods may use. Raises ConfigError for an address that
    no pod can reach.
    """
    if config.controller.backend != "kubernetes":
        return GatewayAddress()
    told = urlsplit(config.kubernetes.gateway_url or config.gateway.url or "")
    if config.gateway.url:
        return GatewayAddress(own_address, told.port or 80)
    host = config.gateway.host
    if told.hostname:
        return GatewayAddress(host, config.gateway.port, told.hostname)
    if host in LOOPBACK:
        message = f"{host!r} is this machine alone; give the address at which pods reach it"
        raise ConfigError("gateway.host", f"{message}, or set kubernetes.gateway_url")
    if host in ANYWHERE:
        raise ConfigError(
            "kubernetes.gateway_url", f"is needed with gateway.host {host!r}, which is no address to call"
        )
    return GatewayAddress(host, config.gateway.port)


def address_towards(url: str) -> str:
    """This machine's address on the way to a server. Nothing is sent. Raises OSError without a way."""
    parts = urlsplit(url)
    family, _, _, _, server = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(server)
        return str(probe.getsockname()[0])


def free_port(host: str, port: int) -> int:
    """`port` if it can be had, else 0 for any."""
    try:
        with socket.create_server((host, port)):
            return port
    except OSError:
        return 0
