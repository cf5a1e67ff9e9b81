"""Where, for whom and with what a run is served; light, so that a wrong flag is said before heavy imports."""

from __future__ import annotations

from dataclasses import dataclass

from dipaco_p2p.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Where, for whom, and with what."""

    host: str
    port: int
    key: str
    memory_bytes: int
    streams_max: int
    device: str

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.key:
            hint = "set DIPACO_KEY to a long random word, and give it to those who may ask"
            raise ConfigError(f"`--host {self.host}` lets other machines in, and there is no key", hint=hint)
