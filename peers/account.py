"""The rounds that this volunteer trained: how many, what each took, and when the run will end at this pace."""

from __future__ import annotations

from dipaco_p2p.node.node import Member
from dipaco_p2p.topology import PathId

from .status import Status
from .work import Work


class Account:
    """Kept over all paths that one volunteer trains in one stage of a run."""

    def __init__(self, node: Member, status: Status) -> None:
        self._node = node
        self._status = status
        self._first: tuple[int, float] | None = None
        """The first round that we trained, and when it began."""
        self._statistics = node.swarm.statistics()
        self.rounds_done = 0

    def begin(self, round_number: int) -> None:
        """A round's inner steps begin; from the second on the end of the run can be estimated."""
        now_s = self._node.clock.now_s()
        first, began_s = self._first = self._first or (round_number, now_s)
        if round_number > first:
            self._status.eta_s = (self._status.rounds - round_number) * (now_s - began_s) / (round_number - first)

    def end(self, path: PathId, work: Work) -> None:
        """A round is done, its push included: note what it took. Rounds whose steps began ahead overlap in time."""
        before, after = self._statistics, self._node.swarm.statistics()
        self._statistics = after
        self.rounds_done += 1
        self._node.history.add(
            "round",
            path=str(path),
            round=work.round_number,
            steps=work.result.steps_done,
            is_cut=work.is_cut,
            tokens=work.result.tokens,
            loss=work.result.loss,
            seconds=self._node.clock.now_s() - work.began_s,
            training_s=work.training_s,
            bytes_pushed=after.bytes_sent - before.bytes_sent,
            bytes_pulled=after.bytes_received - before.bytes_received,
        )
