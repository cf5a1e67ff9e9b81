"""A volunteer of the drills: the swarm's trainer and disk (peers/path/trainer.py, node/store.py), without a line.

In one process with others, or as a process of its own that can be killed: `python -m benchmarks.methods.volunteers HOME
PUBLISHED` reads turns as lines of JSON and writes `ready`, `step N` after each inner step, and `done` with what came of
the turn. Like `dipaco-peer` it has the path's state on its disk before anybody hears of its contributions, and begins a
round that it did not finish again.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dipaco_p2p import strict
from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core.codec import decode_module
from dipaco_p2p.core.shards import decode_shard
from dipaco_p2p.errors import DipacoError, IntegrityError
from dipaco_p2p.node.run import Run, open_run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.topology import PathId
from peers.path.trainer import PathTrainer

MANIFEST = "manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One round of one path, and from what it is trained; blobs by their digests."""

    path: PathId
    round_number: int
    modules: tuple[str, ...]
    """The newest snapshots, one per level."""
    state: str | None
    """The path's inner state as its last trainer left it; None if nobody has trained it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of a turn."""

    payloads: tuple[BlobRef, ...]
    """The compressed outer gradients, one per level."""
    state: BlobRef
    steps: int
    tokens: int
    loss: float


class Volunteer:
    """A trainer that stays at a path while its turns are of that path, and a disk."""

    def __init__(self, run: Run, home: Store, others: Sequence[Store]) -> None:
        """`others` are the disks that blobs are fetched from; there may be more later."""
        self.home = home
        self._run = run
        self._others = others
        self._trainer: PathTrainer | None = None

    def take(self, turn: Turn, on_step: Callable[[int], None] = lambda step: None) -> Done:
        """Train the round; `on_step` hears the number of each inner step. Raises IntegrityError without a blob."""
        trainer = self._at(turn)
        params = [
            decode_module(self.blob(name), self._run.layout(module))
            for name, module in zip(turn.modules, turn.path.modules(), strict=True)
        ]

        flats = trainer.beginning(params)

        def told(step: int) -> bool:
            on_step(step)
            return True

        result = asyncio.run(
            trainer.train(flats, round_number=turn.round_number, replica=(0, 1), on_step=lambda r: told(r.step))
        )
        gradients = trainer.outer_gradients(flats, result.flats)
        state = self.home.put(trainer.state_bytes(gradients))
        payloads = tuple(self.home.put(gradient.payload) for gradient in gradients)
        for gradient in gradients:
            trainer.keep(gradient)
        return Done(
            payloads=payloads, state=state, steps=result.steps_done, tokens=result.tokens, loss=float(result.loss)
        )

    def blob(self, name: str) -> bytes:
        """From this disk or another's; raises IntegrityError if nobody has it."""
        for store in (self.home, *self._others):
            data = store.get(name)
            if data is not None:
                return data
        raise IntegrityError(f"nobody has the blob {name[:8]}")

    def _at(self, turn: Turn) -> PathTrainer:
        """The trainer of the turn's path: the one at hand, or another that goes on from the path's state."""
        if self._trainer is None or self._trainer.path != turn.path:
            model, ref = self._run.config.model, self._run.shard(turn.path)
            shard = decode_shard(self.blob(ref.blob.digest), vocab_size=model.vocab_size, context=model.context)
            optimizer = self.blob(self._run.manifest.optimizer.digest)
            self._trainer = PathTrainer(self._run, turn.path, shard, optimizer=optimizer, device="cpu")
            if turn.state is not None:
                self._trainer.load_state(self.blob(turn.state))
        return self._trainer


class VolunteerProcess:
    """The same in a process of its own; a context manager that leaves nothing behind."""

    def __init__(self, home: Path, published: Path) -> None:
        import torch

        # To the bit the same only with as many threads; and without this the child would not find the project.
        environment = os.environ | {
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", "benchmarks.methods.volunteers", str(home), str(published)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said("ready")

    def __enter__(self) -> VolunteerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def take(self, turn: Turn) -> Done:
        """As `Volunteer.take`. Raises DipacoError if the process ends."""
        self._begin(turn)
        return strict.load(Done, json.loads(self._said("done")), where="the drill's volunteer")

    def take_until(self, turn: Turn, steps: int) -> int:
        """Kill the process when so many inner steps of the turn are done; its exit status."""
        self._begin(turn)
        for _ in range(steps):
            self._said("step")
        return self.kill()

    def kill(self) -> int:
        """As a power cut would; the exit status."""
        self._process.kill()
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return status

    def _begin(self, turn: Turn) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(strict.plain(turn)) + "\n")
        self._process.stdin.flush()

    def _said(self, word: str) -> str:
        """The rest of the next line that begins with `word`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, _, rest = line.strip().partition(" ")
            if first == word:
                return rest
        raise DipacoError(f"a volunteer of the drill ended with exit status {self._process.wait()}")


def publish(run: Run, store: Store) -> None:
    """The manifest, where a volunteer's process finds it."""
    store.write_document(MANIFEST, canonical_bytes(run.sealed.to_dict()))


def serve(home: Path, published: Path, lines: IO[str]) -> None:
    """The life of a volunteer's process."""
    shared = Store(published)
    run = open_run(json.loads(shared.read_document(MANIFEST) or b"null"))
    volunteer = Volunteer(run, Store(home), [shared])
    print("ready", flush=True)
    for line in lines:
        turn = strict.load(Turn, json.loads(line), where="a turn")
        done = volunteer.take(turn, lambda step: print("step", step, flush=True))
        print("done", json.dumps(strict.plain(done)), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.stdin)
