"""What a type and bounds cannot say about a key: names of devices, rates of a line, keys that contradict each other."""

from __future__ import annotations

import re
from typing import Any

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.swarm.blobs.bandwidth import Line

from .keys import Preferences

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
GPU = re.compile(r"auto|none|\d{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}")
PROGRAM_CHARS_MAX = 100
LEAVE_OUT = "leave it out, and there is no limit"


def check_value(name: str, value: Any, *, where: str) -> None:
    """Raises ConfigError, which names `where`, for a value that this key cannot have; other types pass."""
    try:
        if name == "device" and isinstance(value, str):
            _check_form(DEVICE, value, "device", "use auto, cpu, cuda or cuda:1")
        if name == "gpu" and isinstance(value, str):
            _check_form(GPU, value, "GPU", "use its number or UUID as `nvidia-smi -L` lists them, none, or auto")
        if name == "gpu_programs" and isinstance(value, (list, tuple)):
            for program in value:
                _check_program(program)
        if name in ("up_mbit", "down_mbit") and type(value) in (int, float):
            Line(up_mbit=value) if name == "up_mbit" else Line(down_mbit=value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from None


def check_pair(preferences: Preferences) -> None:
    """Raises ConfigError for keys that cannot hold together."""
    training, limits, when = preferences.training, preferences.limits, preferences.when
    if when.gpu_yield == "listed" and not when.gpu_programs:
        hint = 'name some, as `gpu_programs = ["eldenring.exe"]`, or use any or off'
        raise ConfigError('`gpu_yield = "listed"`, but `gpu_programs` lists none', hint=hint)
    if limits.gpu == "none" and training.device.startswith("cuda"):
        raise ConfigError(f'`gpu = "none"`, but `device = "{training.device}"`', hint="leave one of them out")
    if limits.gpu not in ("auto", "none") and training.device not in ("auto", "cuda", "cuda:0"):
        message = f'`gpu = "{limits.gpu}"` is the only GPU that is seen then, but `device = "{training.device}"`'
        raise ConfigError(message, hint="leave one of them out")


def _check_program(name: object) -> None:
    if isinstance(name, str) and (not name.strip() or "/" in name or "\\" in name or len(name) > PROGRAM_CHARS_MAX):
        hint = "write its name as `nvidia-smi` shows it, without the folder: eldenring.exe"
        raise ConfigError(f"`{name[:PROGRAM_CHARS_MAX]}` is no program's name", hint=hint)


def _check_form(form: re.Pattern[str], value: str, what: str, hint: str) -> None:
    if not form.fullmatch(value):
        raise ConfigError(f"`{value}` is no {what}", hint=hint)
