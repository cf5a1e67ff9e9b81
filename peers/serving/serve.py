"""`dipaco-peer serve`: the engine and its API as a program, which follows the run until a signal says stop."""

from __future__ import annotations

import asyncio
import logging

from dipaco_p2p.program.console import on_signals
from dipaco_p2p.program.web import listening, serve_app
from dipaco_p2p.use.served import open_place

from .api import make_app
from .engine import FOLLOW_S, Engine, NotReady
from .terms import Terms

SAID = "serving at "
"""What the line with the address begins with."""


async def serve(source: str, terms: Terms, *, expected: str | None) -> None:
    """Serve the run at `source`, a ticket, an address or a coordinator's folder. Raises DipacoError."""
    refused = f"cannot listen on {terms.host} port {terms.port}"
    hint = "choose another port, or 0 for any free one"
    with listening(terms.host, terms.port, refused=refused, hint=hint) as listener:
        async with open_place(source, expected=expected) as place:
            engine = Engine(place, memory_bytes=terms.memory_bytes, device=terms.device)
            try:
                await engine.follow()
                app = make_app(engine, key=terms.key, streams_max=terms.streams_max)
                host = f"[{terms.host}]" if ":" in terms.host else terms.host
                address = f"http://{host}:{listener.getsockname()[1]}"
                print(f"{SAID}{address}/v1, with a page at {address}/", flush=True)
                stopped = asyncio.Event()
                on_signals(stopped.set)
                tasks = [asyncio.create_task(work) for work in (_follow(engine), serve_app(app, listener))]
                stopping = asyncio.create_task(stopped.wait())
                await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
                # Texts that are cut off now are cut off on purpose, and no errors.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
                for task in (*tasks, stopping):
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(result, Exception):
                        raise result
            finally:
                engine.close()


async def _follow(engine: Engine) -> None:
    """Look for new versions again and again, and say what was found."""
    said = ""
    while True:
        try:
            now = engine.now
            newest = max(version.version for version in now.versions.values())
            line = f"{now.run.name}, {now.run.manifest.stage}: versions up to {newest}, {len(now.paths)} paths"
        except NotReady as error:
            line = str(error)
        if line != said:
            print(line, flush=True)
            said = line
        await asyncio.sleep(FOLLOW_S)
        await engine.follow()
