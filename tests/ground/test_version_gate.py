"""The version gate names both versions, and the command that fits how this program was installed."""

from __future__ import annotations

import pytest

from dipaco_p2p import __version__
from dipaco_p2p.errors import WrongRun
from dipaco_p2p.version_gate import check_protocol, install_command, upgrade_of


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("/u/.local/share/uv/tools/dipaco-p2p", "uv tool upgrade dipaco-p2p"),
        ("/u/.local/share/pipx/venvs/dipaco-p2p", "pipx upgrade dipaco-p2p"),
        ("/u/project/.venv", "pip install -U dipaco-p2p"),
    ],
)
def test_the_upgrade_fits_the_way_of_installation(prefix: str, command: str) -> None:
    assert upgrade_of(prefix, is_editable=False) == command
    assert "dipaco-p2p==VERSION" in install_command(prefix, is_editable=False)


def test_a_checkout_is_pulled() -> None:
    assert "git pull" in upgrade_of("/u/project/.venv", is_editable=True)
    assert "git checkout" in install_command("/u/project/.venv", is_editable=True)


def test_the_same_protocol_passes() -> None:
    check_protocol(7, who="the run", ours=7)


@pytest.mark.parametrize(("said", "word"), [(8, "newer"), (6, "older")])
def test_another_protocol_is_refused_in_either_direction(said: int, word: str) -> None:
    with pytest.raises(WrongRun, match=f"protocol {said}, this program .*{__version__}.* speaks 7") as refused:
        check_protocol(said, who="the run", ours=7)
    assert word in refused.value.hint and refused.value.exit_code == 6
