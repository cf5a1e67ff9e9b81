"""What the coordinator writes into its run's folder, and hands out of it (dipaco_p2p/use/folder.py reads it)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.config import INVITE
from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.node.doorplate import make_ticket, told_address
from dipaco_p2p.node.entry import read_entry
from dipaco_p2p.node.invitations import invite, write_code
from dipaco_p2p.node.ledger import DAMAGED_HINT
from dipaco_p2p.node.run import Run, open_run
from dipaco_p2p.node.store import Store
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.protocol.documents import Manifest, Sealed, Sharding
from dipaco_p2p.protocol.manifest import STAGES
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.identity import KEY_NAME, load_or_create
from dipaco_p2p.use.folder import DECREES as DECREES
from dipaco_p2p.use.folder import MANIFEST, RunFolder, manifest_path


def read_stage(root: Path, stage: str) -> Run | None:
    """A stage without its shardings, and without opening the store: its owner may be at work."""
    path = manifest_path(root, stage)
    try:
        return open_run(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IntegrityError) as error:
        raise IntegrityError(f"{path} was damaged on disk: {error}", hint=DAMAGED_HINT) from None


def read_stages(root: Path) -> list[Run]:
    """All that are prepared, the first one first; as `read_stage`."""
    return [run for name in STAGES if (run := read_stage(root, name)) is not None]


def write_stage(store: Store, sealed: Sealed[Manifest]) -> Run:
    """From here on the stage is there."""
    store.write_document(MANIFEST, canonical_bytes(sealed.to_dict()))
    return Run(sealed)


def write_sharding(store: Store, sealed: Sealed[Sharding]) -> None:
    """A further sharding of the stage that the store holds."""
    store.write_document(f"sharding-{sealed.document.number:04d}", canonical_bytes(sealed.to_dict()))


def text_path(root: Path, name: str) -> Path:
    """Where the text of a growth is, by the digest that its decree names (text/added.py)."""
    return root / f"text-{name}.safetensors"


def text_paths(root: Path) -> list[Path]:
    """All of these that there are."""
    return sorted(root.glob("text-*.safetensors"))


RESTORED = "restored.json"
RESTORED_SCHEMA = "dipaco.restored/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Of a folder."""

    made_s: float
    is_caught_up: bool = False


def read_marker(root: Path) -> Marker | None:
    """None for a folder that never came out of a backup, or has long caught up; raises IntegrityError."""
    try:
        value = json.loads((root / RESTORED).read_bytes())
        return Marker(made_s=float(value["made_s"]), is_caught_up=value["is_caught_up"] is True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{root / RESTORED} cannot be read: {error}"
        raise IntegrityError(message, hint="restore the backup once more, into another folder") from None


def require_caught_up(root: Path) -> None:
    """Raise EnvironmentUnfit while this coordinator may have forgotten what it has signed."""
    marker = read_marker(root)
    if marker is not None and not marker.is_caught_up:
        message = f"`{root}` was restored from a backup, and does not know yet what was signed after it"
        raise EnvironmentUnfit(message, hint="let `dipaco-bootstrap start` catch up with the swarm first")


def write_marker(root: Path, marker: Marker) -> None:
    write_atomically(root / RESTORED, json.dumps({"schema": RESTORED_SCHEMA, **asdict(marker)}).encode())


def drop_marker(root: Path) -> None:
    (root / RESTORED).unlink(missing_ok=True)


NO_SEED_HINT = "start the coordinator once, or name an address: --seed /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."


def ticket_of(folder: Path, *, seeds: Sequence[str]) -> str:
    """The ticket of the run in `folder`, with `seeds` first, since whoever names them knows, and behind the coordinator
    volunteers that have worked. A coordinator may be at work there. Raises ConfigError for a folder without a run, or
    for an invalid address."""
    run, _ = RunFolder(folder, is_read_only=True).require()
    known = known_addresses(folder)
    if not seeds and not known:
        raise ConfigError(f"the run in `{folder}` has never been open, so nobody can be reached yet", hint=NO_SEED_HINT)
    return make_ticket(run, seeds or known[:1], more=known)


def coordinators_key(root: Path, run: Run) -> Signer:
    """The key in the folder of `run`; raises IntegrityError if it is not its coordinator's."""
    signer = load_or_create(root / KEY_NAME)
    if signer.peer != run.manifest.author:
        hint = "bring its identity.key back"
        raise IntegrityError(f"the key in `{root}` is not this run's coordinator's", hint=hint)
    return signer


def invitation_of(folder: Path, peer: str, *, at_s: float) -> str:
    """The code that lets a peer into the run in `folder`, by the coordinator's word; it may be at work there. Raises
    ConfigError for a folder without a run of the invited, and for what is no peer id."""
    stages = read_stages(folder)
    if not stages:
        raise ConfigError(f"`{folder}` holds no prepared run", hint="give the folder that `start --dir` was given")
    run = stages[-1]
    if (policy := run.config.admission.policy) != INVITE:
        hint = 'only a run file with `policy = "invite"` in [admission] makes a run of the invited'
        raise ConfigError(f"the admission of {run.name} is `{policy}`: nobody is invited to it", hint=hint)
    return write_code(invite(coordinators_key(folder, run), run.origin, PeerId(peer), at_s=at_s))


def known_addresses(folder: Path) -> tuple[str, ...]:
    """Where the coordinator was reached last, then others of the run; nothing before its first start."""
    plate = told_address(folder)
    return () if plate is None else read_entry(plate.ticket).addresses
