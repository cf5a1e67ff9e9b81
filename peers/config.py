"""`PeerConfig`: what one volunteer chooses for one machine. Only its name and team are sent; nothing of it is part of a
run's fingerprint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.protocol.names import read_name

from .preferences.keys import Limits, Preferences, When


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """A volunteer's own settings."""

    home: Path
    """Identity, module state, shards and history are kept here."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    threads: int = 0
    """CPU threads for training; 0: all cores, but one of more than two is left to the network."""
    engine: str = "auto"
    """How inner steps are computed: `auto`, `exact`, `bf16` or `fast` (core/model/engine.py)."""
    micro_batch: int = 0
    """Sequences that go through the model at once; 0: as many as memory holds (core/model/microbatch.py)."""
    checkpoint: bool | None = None
    """Whether activations are computed again on the way back, to save memory; None: if need be."""
    eight_bit: bool | None = None
    """Whether AdamW keeps its moments in 8 bits; None: on a GPU that is short of memory (core/model/optimizer.py)."""
    listen: str = "/ip4/0.0.0.0/tcp/0"
    announce: str = ""
    """Where others dial this peer from outside, if that is not where it listens."""
    is_listening: bool = True
    """Whether others may dial this peer; one that does not listen leads no module."""
    relay: bool = False
    """Whether peers behind routers are dialled through this one, if it can be reached."""
    relay_mbit: float = 20.0
    """What that may take of the line, each way."""
    up_mbit: float | None = None
    down_mbit: float | None = None
    """What blobs may take of the line; None is all of it."""
    log: tuple[str, ...] = ()
    """Where curves go (program/curves.py)."""
    evaluate: bool = False
    """Whether to check the coordinator's losses between rounds (evaluation/between_rounds.py)."""
    name: str = ""
    """What it is called on public pages (protocol/names.py); empty for its id alone, which is always shown."""
    team: str = ""
    grace_s: float = 60.0
    """Time for finishing cleanly after the first Ctrl-C."""
    when: When = When()
    """When it may train."""
    limits: Limits = Limits()
    """What it may take of the machine."""

    @classmethod
    def of(cls, preferences: Preferences) -> Self:
        """What the preferences come to on this machine."""
        peer, training, limits = preferences.peer, preferences.training, preferences.limits
        if limits.disk_gb is not None and limits.keep_gb > limits.disk_gb / 2:
            raise ConfigError(
                f"`keep_gb` is {limits.keep_gb:g}, and the home folder may have {limits.disk_gb:g} GB (`disk_gb`)",
                hint="keep at most half of it for others: training needs room, too",
            )
        return cls(
            home=Path(peer.home).expanduser() if peer.home else default_home(),
            device="cpu" if limits.gpu == "none" else training.device,
            threads=training.threads,
            engine=training.engine,
            micro_batch=training.micro_batch,
            checkpoint=training.checkpoint,
            eight_bit=training.eight_bit,
            listen=preferences.network.listen,
            announce=preferences.network.announce,
            is_listening=preferences.network.listening,
            relay=preferences.network.relay,
            relay_mbit=preferences.network.relay_mbit,
            up_mbit=limits.up_mbit,
            down_mbit=limits.down_mbit,
            grace_s=peer.grace,
            evaluate=peer.evaluate,
            name=read_name(preferences.public.name),
            team=read_name(preferences.public.team, what="team"),
            log=peer.log,
            when=preferences.when,
            limits=limits,
        )

    def run_folder(self, run: str) -> Path:
        """Where this machine keeps what belongs to one run."""
        return self.home / "runs" / run[:16]


def default_home() -> Path:
    """`$DIPACO_HOME`, else what the file of preferences says, else the platform's place for a user's data."""
    import platformdirs

    from .preferences.layers import home_in_file

    given = os.environ.get("DIPACO_HOME") or home_in_file()
    return Path(given).expanduser() if given else platformdirs.user_data_path("dipaco-p2p")


def torch_device(name: str) -> str:
    """The device to train on; raises EnvironmentUnfit when a GPU was asked for and there is none."""
    import torch

    from dipaco_p2p.core.model.engine import spare_device

    if name == "auto":
        return spare_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"`{name}` is not a device", hint="use auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise EnvironmentUnfit(
            f"torch sees no `{name}` on this machine", hint="try --device cpu, or install torch for CUDA"
        )
    return name
