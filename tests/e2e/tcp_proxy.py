"""A TCP proxy for tests, a program of its own: passes bytes on late, and resets its connections some times.

    python tcp_proxy.py --listen 10.0.0.1:4001 --to 127.0.0.1:4000 --delay-s 0.05 --resets 3 --every-s 2 --report FILE

FILE is there as soon as it listens, and says how many bytes and resets there were. Ends with SIGTERM, with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import struct
from collections import Counter
from pathlib import Path

CHUNK_BYTES = 64 * 1024
NO_LINGER = struct.pack("ii", 1, 0)
"""Closing then sends RST in place of FIN, as a router that lost its table makes happen."""


class Proxy:
    """All connections through one listening socket."""

    def __init__(self, target: tuple[str, int], *, delay_s: float, report: Path) -> None:
        self._target = target
        self._delay_s = delay_s
        self._report = report
        self._open: set[asyncio.StreamWriter] = set()
        self._used = asyncio.Event()
        self._counts: Counter[str] = Counter(bytes=0, resets=0, connections=0)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a new connection with one to the target, both ways."""
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._counts["connections"] += 1
        self._used.set()
        self._open |= {writer, there_writer}
        await asyncio.gather(self._pass_on(reader, there_writer), self._pass_on(there_reader, writer))
        self._open -= {writer, there_writer}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()
                self._counts["bytes"] += len(data)
        writer.close()

    async def reset_all(self, times: int, *, every_s: float) -> None:
        """Reset whatever is open, `times` times, from the first connection on."""
        await self._used.wait()
        for _ in range(times):
            await asyncio.sleep(every_s)
            for writer in list(self._open):
                with contextlib.suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                    writer.transport.abort()
            self._counts["resets"] += 1
            self.report()

    def report(self) -> None:
        """Say how many there were of everything."""
        self._report.write_text(json.dumps(self._counts))


async def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = {"listen": str, "to": str, "delay-s": float, "resets": int, "every-s": float, "report": Path}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    options = parser.parse_args()
    proxy = Proxy(place(options.to), delay_s=options.delay_s, report=options.report)
    server = await asyncio.start_server(proxy.accept, *place(options.listen))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    resetting = asyncio.create_task(proxy.reset_all(options.resets, every_s=options.every_s))
    proxy.report()
    await stopped.wait()
    resetting.cancel()
    server.close()
    proxy.report()


def place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    asyncio.run(main())
