"""`PeerConfig`: what one volunteer chooses for one machine. Never sent, never part of a run's fingerprint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """A volunteer's own settings."""

    home: Path
    """Identity, module state, shards and history are kept here."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    threads: int = 0
    """CPU threads for training; 0 lets torch decide."""
    listen: str = "/ip4/0.0.0.0/tcp/0"
    is_listening: bool = True
    """Whether others may dial this peer; one that does not listen leads no module."""
    grace_s: float = 60.0
    """Time for finishing cleanly after the first Ctrl-C."""

    def run_folder(self, run: str) -> Path:
        """Where this machine keeps what belongs to one run."""
        return self.home / "runs" / run[:16]


def default_home() -> Path:
    """`$DIPACO_HOME`, else the platform's place for a user's data."""
    import platformdirs

    given = os.environ.get("DIPACO_HOME")
    return Path(given) if given else platformdirs.user_data_path("dipaco-p2p")


def torch_device(name: str) -> str:
    """The device to train on; raises EnvironmentUnfit when a GPU was asked for and there is none."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"`{name}` is no device", hint="use auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise EnvironmentUnfit(
            f"torch sees no `{name}` on this machine", hint="try --device cpu, or install torch for CUDA"
        )
    return name
