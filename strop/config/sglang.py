"""How a running sglang server is reached."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from strop.config.section import Section

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class SglangConfig(Section):
    """An sglang server that was started by hand; read by sampler.kind sglang."""

    address: str = ""
    """HOST:PORT of the server, or https://HOST:PORT. What goes over plain HTTP can be read on its way."""
    key_file: str = ""
    """A file that holds the key that the server was started with, as --api-key or --admin-api-key."""
    weights_folder: str = ""
    """A folder that the server sees under the same path: each version of the weights is written into it, and the one
    before is removed. Empty takes a temporary one, for a server on this machine that runs as the same user."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Give a request up after so long, its wait at the server included."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Stop when the server is not healthy after so long."""

    @property
    def place(self) -> tuple[str, str, int]:
        """(scheme, host, port). ValueError when the address is none."""
        parts = urlsplit(self.address if "://" in self.address else f"http://{self.address}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or not parts.port:
            raise ValueError(f"{self.address!r} is not HOST:PORT, like 127.0.0.1:30000, and not https://HOST:PORT")
        return parts.scheme, parts.hostname, parts.port

    def problems(self) -> list[str]:
        """What is wrong with this section, a sentence each."""
        try:
            _, host, _ = self.place
        except ValueError as error:  # urlsplit's own too, for a port that is no number
            return [f"sampler.sglang.address: {error}"]
        if host not in LOOPBACK and not self.weights_folder:
            return [
                f"sampler.sglang.address names {host}: set sampler.sglang.weights_folder to a folder that it and this "
                "machine see under the same path"
            ]
        return []
