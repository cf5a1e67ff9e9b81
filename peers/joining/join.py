"""From an address to a running volunteer: the composition of all parts, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from functools import partial

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.core.model.optimizer import check_optimizer
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.doorplate import tell_address, whom_to_remember
from dipaco_p2p.node.invitations import Code, read_code
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.program.console import LogFormat, log_to, on_signals
from dipaco_p2p.program.control.server import listening
from dipaco_p2p.program.curves import Curves
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import read_address, worth_giving

from ..config import PeerConfig, torch_device
from ..control.control import Control, Request
from ..decrees import check_ban
from ..display import tell
from ..governor.governor import check_before, governed
from ..governor.machine import use_threads
from ..invitations import check_admitted, invitations_for, keep
from ..stages import Entrance, Parts, StageRunner
from .arrival import KnownPeers, arrive
from .choice import Choice, remember
from .preview import take_preview

DAMAGED_HINT = "another peer's data is damaged or forged, not yours: tell the coordinator, then join again"
LOCKED_HINT = "one folder serves one volunteer: choose another --home, or stop the other volunteer"


async def join(
    choice: Choice,
    config: PeerConfig,
    *,
    verbose: bool,
    is_dry: bool = False,
    log_format: LogFormat = LogFormat.TEXT,
    invitation: str | None = None,
    curves: Curves | None = None,
) -> None:
    """Take part in the run of `choice` until it is complete or a signal says stop; with
    `is_dry` only say what that would take. `invitation` is a code, kept for later starts; `curves` follow what it does.
    Raises DipacoError."""
    parts = Parts(log_to=partial(log_to, kind=log_format, verbose=verbose), curves=curves or Curves())
    code = None if invitation is None else read_code(invitation)
    check_before(config, SystemClock())
    device = torch_device(config.device)
    use_threads(config.threads)
    control = Control(config, SystemClock())
    gc.freeze()  # what was imported stays: it need not be looked through again and again
    with folder_lock(config.home, hint=LOCKED_HINT):
        async with listening(config.home, Request, control.answer):
            await _join(choice, config, control, parts, device=device, is_dry=is_dry, code=code)


async def _join(
    choice: Choice,
    config: PeerConfig,
    control: Control,
    parts: Parts,
    *,
    device: str,
    is_dry: bool,
    code: Code | None,
) -> None:
    entry, friends = choice.entry(), KnownPeers(config.home)
    arrival = await arrive(entry, config, friends, tell=tell)
    swarm, opened = arrival.swarm, arrival.opened

    async def dial() -> None:
        known = [*entry.addresses, *friends.of(entry.key)[1]]
        await swarm.join({text: read_address(text) for text in dict.fromkeys(known)})

    def meet(stage: Run, watch: Watch, workers: Collection[PeerId]) -> None:
        known_run, before = friends.of(entry.key)
        before = before if known_run == stage.origin else []
        met = whom_to_remember(watch, before, workers=workers, me=swarm.peer)
        friends.remember(entry.key, run=stage.origin, addresses=met)

    def name(stage: Run, seeds: Sequence[str], volunteers: Sequence[str]) -> None:
        if worth_giving(swarm.addresses):  # others can join through us, should the coordinator's address not answer
            ours = [text for text in entry.addresses if read_address(text).peer == stage.manifest.author]
            tell_address(config.home, swarm, stage, seeds=[*dict.fromkeys([*ours, *seeds])], volunteers=volunteers)

    try:
        preview = await take_preview(arrival, config, device=device, with_path=is_dry)
        check_optimizer(preview.run.config.inner, eight_bit=config.eight_bit)
        if is_dry:
            print("\n".join(preview.lines()), flush=True)
        check_ban(preview.decreed, swarm.peer)
        invitations = invitations_for(preview.run, swarm.peer, config.home, code)
        check_admitted(preview.run, swarm.peer, invitations, preview.decreed)
        if is_dry:
            print("nothing was claimed or sent; to start, leave out --dry-run", flush=True)
            return
        if invitations:
            keep(config.home, preview.run.origin, invitations)
        tell("\n".join(preview.lines()))
        remember(config.home, choice.text, run=preview.run.origin)
        friends.remember(entry.key, run=opened.stages[-1].origin, addresses=friends.of(entry.key)[1])
        name(opened.stages[-1], (), ())
        entrance = Entrance(host=opened.host, dial=dial, meet=meet, name=name, invitations=invitations)
        runner = StageRunner(swarm, config, SystemClock(), entrance=entrance, device=device, parts=parts)
        for address in dict.fromkeys([opened.address, *entry.addresses]):
            peer = read_address(address).peer
            runner.typed[peer] = (*runner.typed.get(peer, ()), address)
        control.runner = runner
        on_signals(runner.stop)
        async with governed(runner, config, swarm, SystemClock(), device=device):
            await runner.take_part(opened.stages)
        if choice.closing and runner.status is not None and runner.status.is_complete:
            tell(choice.closing)
    except IntegrityError as error:
        raise error.reworded(str(error), hint=error.hint or DAMAGED_HINT) from None
    finally:
        await swarm.close()
