"""Who held which path and led which module at which time, by the histories and what was done to the processes."""

from __future__ import annotations

from bisect import bisect_right

from .evidence import Done, Event, Evidence


class Timeline:
    """Questions about moments of a run that has ended."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._claims = {name: _steps(events) for name, events in evidence.histories.items()}

    def path_of(self, name: str, at_s: float) -> str | None:
        """The path that a member claimed at a time, by its own word; it may be dead."""
        times, paths = self._claims.get(name, ([], []))
        place = bisect_right(times, at_s)
        return paths[place - 1] if place else None

    def is_up(self, name: str, at_s: float) -> bool:
        """Whether the member was running, not frozen, and had not left."""
        history = self._evidence.histories.get(name, ())
        last = [event.ev for event in history if event.t_s <= at_s and event.ev in ("joined", "left")][-1:]
        return last == ["joined"] and not any(death.t_s <= at_s < back_s for death, back_s in self._absences(name))

    def claimants(self, path: str, at_s: float) -> set[str]:
        """The members that ran and claimed this path."""
        return {name for name in self._claims if self.path_of(name, at_s) == path and self.is_up(name, at_s)}

    def led_by(self, name: str, at_s: float) -> set[str]:
        """The modules for which nobody had begun a newer term than this member, and which it had not handed over."""
        leads: dict[str, tuple[int, str]] = {}
        moves = [(event.t_s, who, event) for who, event in self._evidence.events("leads", "handed_over")]
        for t_s, who, event in sorted(moves, key=lambda move: move[0]):
            if t_s > at_s:
                break
            module = event["module"]
            if event.ev == "leads":
                leads[module] = max(leads.get(module, (0, "")), (event["term"], who))
            elif leads.get(module, (0, ""))[1] == who:
                del leads[module]
        return {module for module, (_, who) in leads.items() if who == name}

    def retaken_s(self, death: Done, path: str) -> float | None:
        """When the path had a claimant again that is not the victim: the death itself if it had one then."""
        if self.claimants(path, death.t_s) - {death.name}:
            return death.t_s
        return self.first("claimed", after_s=death.t_s, without=death.name, path=path)

    def first(self, *names: str, after_s: float, without: str = "", by: str = "", **values: object) -> float | None:
        """When the first such event came after a time."""
        times = [
            event.t_s
            for name, event in self._evidence.events(*names)
            if event.t_s > after_s
            and name != without
            and by in ("", name)
            and all(event.values.get(key) == value for key, value in values.items())
        ]
        return min(times, default=None)

    def _absences(self, name: str) -> list[tuple[Done, float]]:
        found = []
        for death in self._evidence.deaths():
            if death.name == name:
                back_s = self._evidence.back_s(death)
                found.append((death, float("inf") if back_s is None else back_s))
        return found


def _steps(events: tuple[Event, ...]) -> tuple[list[float], list[str | None]]:
    """The times at which a member's path changed, and what it was from then on."""
    times, paths = list[float](), list[str | None]()
    for event in events:
        if event.ev in ("claimed", "released", "joined"):
            times.append(event.t_s)
            paths.append(event["path"] if event.ev == "claimed" else None)
    return times, paths
