"""Where the control socket of a program is: in its home (a volunteer's home, a run's folder), for its owner only.

    control.sock     the socket; absent when it has to be elsewhere
    control.json     {"socket": path} when its path would be longer than a socket's may be (107 bytes on Linux), or the
                     file system knows no sockets: then it is in the user's runtime folder, under a hashed name

Whoever opens it holds the home's lock, so a socket that is there already belongs to a process that has died.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import stat
import tempfile
from pathlib import Path

from ...errors import EnvironmentUnfit
from ..files import write_atomically

SOCKET_NAME, POINTER_NAME = "control.sock", "control.json"
PATH_BYTES_MAX = 107
"""unix(7): 108 with the terminating zero."""
BACKLOG = 16
NO_SOCKETS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EACCES}
"""What file systems without sockets say."""


def open_socket(home: Path) -> tuple[socket.socket, Path]:
    """A listening socket for `home`, and where it is; raises EnvironmentUnfit if there can be none."""
    home = home.absolute()
    remove_socket(home)
    inside = home / SOCKET_NAME
    if _fits(inside):
        try:
            return _listen(inside), inside
        except OSError as error:
            if error.errno not in NO_SOCKETS:
                raise _unfit(inside, error) from None
    outside = _outside(home)
    try:
        outside.unlink(missing_ok=True)
        listening = _listen(outside)
    except OSError as error:
        raise _unfit(outside, error) from None
    write_atomically(home / POINTER_NAME, json.dumps({"socket": str(outside)}).encode())
    return listening, outside


def find_socket(home: Path) -> Path | None:
    """Where the socket of `home` should be, whether anybody listens there or not; None without one."""
    inside = home.absolute() / SOCKET_NAME
    if _is_socket(inside):
        return inside
    try:
        path = Path(json.loads((home / POINTER_NAME).read_bytes())["socket"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if _is_socket(path) else None


def remove_socket(home: Path) -> None:
    """Take away the socket of `home`, and the word of where it is."""
    path = find_socket(home)
    with contextlib.suppress(OSError):
        if path is not None:
            path.unlink()
        (home / POINTER_NAME).unlink(missing_ok=True)


def runtime_folder() -> Path:
    """The user's folder for sockets; raises EnvironmentUnfit for one that others may write to."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(given) if given.startswith("/") else Path(tempfile.gettempdir())
    folder = base / f"dipaco-p2p-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise EnvironmentUnfit(f"{folder} is not a folder of this user alone", hint=f"remove it, or chmod 700 {folder}")
    return folder


def _outside(home: Path) -> Path:
    name = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]
    try:
        path = runtime_folder() / f"{name}.sock"
    except OSError as error:
        raise _unfit(home / SOCKET_NAME, error) from None
    if not _fits(path):
        raise EnvironmentUnfit(f"{path} is too long for a socket", hint="choose a shorter TMPDIR or XDG_RUNTIME_DIR")
    return path


def _listen(path: Path) -> socket.socket:
    """Its file is never anybody else's to open, not even between its making and a chmod."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(made.fileno(), 0o600)  # on Linux the file gets the socket's own mode
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= PATH_BYTES_MAX


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False


def _unfit(path: Path, error: OSError) -> EnvironmentUnfit:
    return EnvironmentUnfit(f"cannot open the control socket {path}: {error.strerror}", hint="choose another folder")
