"""Every key of a volunteer's preferences, declared once: its table, type, bounds, default, and what it means.

From here come the file's form, the flags of `dipaco-peer join`, the names in the environment, the commented template
and the reference. `up_mbit` in [limits] is the flag `--up-mbit` and the variable `DIPACO_UP_MBIT`.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any

from .schedule import Span

GB = 10**9
"""What keys that end in `_gb` count in: bytes."""
ENGINES = ("auto", "exact", "bf16", "fast")
"""As in core/model/engine.py, which takes seconds to import."""
YIELDS = ("any", "listed", "off")


def key(
    default: Any,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    example: str = "",
) -> Any:
    """A field that is a key; `text` is its help, `example` a value in TOML for one whose default is to be left out."""
    bounds = {"low": low, "high": high, "choices": choices}
    return field(default=default, metadata={**bounds, "help": text, "example": example})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKeys:
    """The program itself."""

    home: str = key(
        "",
        "Folder for identity, state and history. Default: the user's data folder.",
        example='"/data/dipaco"',
    )
    grace: float = key(60.0, "Seconds for finishing cleanly after Ctrl-C.", low=0.0, high=3600.0)
    evaluate: bool = key(False, "Check published losses between rounds, in at most a tenth of the time.")
    log: tuple[str, ...] = key(
        (),
        "Write curves of the rounds to tensorboard:DIR, wandb, wandb:PROJECT or csv:FILE. Repeatable.",
        example='["tensorboard:/data/curves", "csv:/data/curves.csv"]',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingKeys:
    """How inner steps are computed."""

    device: str = key("auto", "auto, cpu, cuda or cuda:1.")
    threads: int = key(0, "CPU threads for training; 0: all cores but one, or both of two.", low=0, high=4096)
    engine: str = key("auto", "auto, exact (float32), bf16, or fast (bf16 and compiled).", choices=ENGINES)
    micro_batch: int = key(
        0, "Sequences that go through the model at once; 0: as many as fit into memory.", low=0, high=65_536
    )
    checkpoint: bool | None = key(
        None, "Recompute activations to save memory. Default: only if it is short.", example="true"
    )
    eight_bit: bool | None = key(
        None, "Keep AdamW's moments in 8 bits. Default: only on a GPU that is short of memory.", example="true"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkKeys:
    """How others reach this machine."""

    listen: str = key("/ip4/0.0.0.0/tcp/0", "The address to listen at; port 0 takes any free one.")
    announce: str = key(
        "",
        "The address outside, if the router forwards another port than this one. Default: the same port.",
        example='"/ip4/203.0.113.7/tcp/40000"',
    )
    listening: bool = key(
        True, "Let others dial this machine. Otherwise not even a relay is used: it trains, but leads no module."
    )
    relay: bool = key(False, "Relay for peers behind routers, if others can dial this machine directly.")
    relay_mbit: float = key(
        20.0, "The most that relaying may take of the line each way, in Mbit/s.", low=0.1, high=100_000.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKeys:
    """A name and a team, signed. Others see them beside this volunteer's id."""

    name: str = key("", "Your name on public pages, beside your id. Default: the id alone.", example='"Ada"')
    team: str = key("", "Your team on public pages. Default: no team.", example='"The Analysts"')


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """When it trains. Outside these times it pauses: the claim goes to others, the process stays."""

    schedule: tuple[Span, ...] = key(
        (),
        'When to train, in local time, such as "mon-fri 19:00-08:00, sat-sun". Default: "always".',
        example='["mon-fri 19:00-08:00", "sat-sun"]',
    )
    only_idle: float = key(
        0.0,
        "Train only after this many minutes without user input; 0: even while the machine is in use.",
        low=0.0,
        high=1440.0,
    )
    on_battery: bool = key(False, "Train on battery power, too.")
    gpu_yield: str = key(
        "any",
        "any: leave the GPU to every other program that uses it; listed: only to gpu_programs; off: to none.",
        choices=YIELDS,
    )
    gpu_programs: tuple[str, ...] = key(
        (),
        "Names of programs that get the GPU as soon as they have anything on it.",
        example='["eldenring.exe", "blender"]',
    )
    gpu_temperature_c: float | None = key(
        None,
        "Pause when the GPU reaches this temperature, in degrees Celsius, until it is 5 cooler.",
        low=30.0,
        high=110.0,
        example="80",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What it may take of this machine. Without a limit: what training needs."""

    gpu: str = key(
        "auto", "Which GPU: its number as in nvidia-smi, its UUID, none (train on the CPU), or auto.", example='"0"'
    )
    gpu_memory: float | None = key(
        None, "The most to take of the GPU's memory: a share from 0.05 to 1.", low=0.05, high=1.0, example="0.5"
    )
    cpu: float | None = key(
        None,
        "The most to take of all cores' time: a share from 0.01 to 1, kept by waiting between steps.",
        low=0.01,
        high=1.0,
        example="0.5",
    )
    ram_gb: float | None = key(
        None, "The most memory for the program, in GB: batches get smaller before it is reached.", low=0.25, example="8"
    )
    disk_gb: float | None = key(
        None,
        "The most disk for the home folder, in GB: old data is deleted before it is reached.",
        low=0.0001,
        example="20",
    )
    keep_gb: float = key(
        0.0,
        "The most disk for old versions that are kept for others, in GB; 0 keeps none.",
        low=0.0,
        high=1e6,
        example="20",
    )
    up_mbit: float | None = key(
        None,
        "The most to upload, in Mbit/s, without calls and heartbeats, which are small. Default: no limit.",
        example="20",
    )
    down_mbit: float | None = key(
        None, "The most to download, in Mbit/s, counted likewise. Default: no limit.", example="80"
    )
    month_gb: float | None = key(
        None,
        "The most to send and receive in a calendar month, together, in GB. Default: no limit.",
        low=0.001,
        example="500",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The tables of the file."""

    peer: PeerKeys = PeerKeys()
    training: TrainingKeys = TrainingKeys()
    network: NetworkKeys = NetworkKeys()
    public: PublicKeys = PublicKeys()
    when: When = When()
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key, and how it is called in every place."""

    table: str
    name: str
    kind: Any
    default: Any
    text: str
    example: str

    @property
    def path(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def variable(self) -> str:
        return variable_of(self.name)

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def is_list(self) -> bool:
        """Whether it has several values, with commas between them where they are one text."""
        return typing.get_origin(self.kind) is tuple

    @property
    def is_switch(self) -> bool:
        """Whether it is yes or no."""
        return bool in (self.kind, *typing.get_args(self.kind))


def variable_of(name: str) -> str:
    """How a key is called in the environment."""
    return f"DIPACO_{name.upper()}"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _settings() -> dict[str, Setting]:
    found = {}
    for table, kind in TABLES.items():
        hints = typing.get_type_hints(kind)
        for known in dataclasses.fields(kind):
            data = known.metadata
            found[known.name] = Setting(
                table=table,
                name=known.name,
                kind=hints[known.name],
                default=known.default,
                text=data["help"],
                example=data["example"],
            )
    return found


TABLES: dict[str, Any] = typing.get_type_hints(Preferences)
SETTINGS: dict[str, Setting] = _settings()
"""By name; no two tables share one."""
GONE = {
    "gpu_power_w": "is gone: clocks and power of a card are never set here; take it out, and use `gpu_temperature_c`, "
    "or set the card's own limit yourself with `nvidia-smi -pl`"
}
"""Keys that there were, and what to do about them."""
