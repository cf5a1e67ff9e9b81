"""Where a leaderboard is: its file, its folder beside a run, its port, the path that it is put under."""

import re

from dipaco_p2p.errors import ConfigError

FILE = "leaderboard.sqlite"
IN_RUN_FOLDER = "leaderboard"
"""Where `start` keeps the tables, in the folder of its run."""
DEFAULT_PORT = 31380
LOG = "leaderboard.log"
BASE_CHARS_MAX = 100
SAID = "leaderboard: "
"""How the line begins that says where a page is served."""


def check_base(base: str) -> None:
    """Raise ConfigError for what is no path to put a site under: empty, or as `/board`."""
    if base and (len(base) > BASE_CHARS_MAX or not re.fullmatch(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+", base)):
        hint = "write it like /board: letters, digits, - and _ after each slash, and no slash at the end"
        raise ConfigError(f"`{base[:BASE_CHARS_MAX]}` is not a path for a site", hint=hint)
