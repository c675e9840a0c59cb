"""What became of a scenario's requests, what its app has run, and the invariant over both."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gunicorn_server import is_alive, until

# Under which a scenario's figures are kept as a line of JSON, where it is set.
REPORT = "GYM_GUNICORN_FAULT_REPORT"


class Ledger:
    """The file in which ``tests.faults.ledger`` writes what was run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def env(self) -> dict[str, str]:
        return {"LEDGER": str(self.path)}

    def runs(self) -> Counter[str]:
        """Return how often each request was run."""
        if not self.path.exists():
            return Counter()
        return Counter(line.partition(" ")[0] for line in self.path.read_text().splitlines())


@contextmanager
def ledger() -> Iterator[Ledger]:
    """A ledger of a test's own, which workers of another user can write to as well."""
    with TemporaryDirectory(prefix="gg-ledger-", dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Ledger(Path(folder) / "ledger")


@dataclass
class Tally:
    """What became of the requests of a scenario.

    ``faults`` says in words what must never happen; ``gone_from`` are the pids of owners
    whose sessions got 410. ``answered``, ``refused``: the nonces of requests that got 200,
    and of those that got 503 with the promise that they were not run. ``idle``: requests over
    connections over which their callers had sent nothing for longer than a stopping server lets
    them linger, and which were closed. ``anew``: sessions that began anew without a word, where a scenario
    says that this is right. ``ids`` are all sessions there ever were,
    and ``owners`` the pids of those that answered.
    """

    requests: int = 0
    right: int = 0
    gone: int = 0
    busy: int = 0
    broken: int = 0
    idle: int = 0
    hung: int = 0
    anew: int = 0
    sessions: int = 0
    faults: list[str] = field(default_factory=list)
    gone_from: set[int] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)
    owners: set[int] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    causes: Counter[str] = field(default_factory=Counter)
    # How many removals of sockets are not healed yet, and the event loop's time when the last one was:
    # requests made before then may get 410 from owners that live.
    unhealed: int = 0
    healed: float = 0.0

    def line(self) -> str:
        """Return the figures in words."""
        return (
            f"{self.sessions} sessions, {self.requests} requests: {self.right} right, {self.gone} x 410, "
            f"{self.busy} x 503, {self.broken} broken, {self.idle} idle ones closed, {self.anew} begun anew, "
            f"{len(self.faults)} wrong, {self.hung} hung"
        )

    def check(self, ledger: Ledger, *, owners_live: bool = False) -> None:
        """Fail where the invariant is broken.

        Args:
            owners_live: whether 410 may have been said of owners that live on.
        """
        runs = ledger.runs()
        self.faults += [f"{nonce} was run {times} times" for nonce, times in runs.items() if times > 1 and nonce != "-"]
        self.faults += [f"{nonce} was answered and never run" for nonce in self.answered if not runs[nonce]]
        self.faults += [f"{nonce} got 503, and was run" for nonce in self.refused if runs[nonce]]
        if not owners_live:
            for pid in self.gone_from:
                until(lambda pid=pid: not is_alive(pid), f"{pid}, whose sessions got 410, has ended")  # type: ignore[misc]
        assert not self.faults, (self.line(), self.faults[:20], self.causes)
        assert not self.hung, (self.line(), self.causes)

    def report(self, scenario: str, left: int = 0) -> None:
        """Keep the figures for the table, where somebody wants it."""
        path = os.environ.get(REPORT)
        if path:
            figures = {
                "scenario": scenario,
                **{
                    name: getattr(self, name)
                    for name in ("requests", "right", "gone", "busy", "broken", "idle", "hung", "anew")
                },
                "wrong": len(self.faults),
                "left": left,
                "causes": self.causes,
            }
            with open(path, "a") as file:
                file.write(json.dumps(figures) + "\n")
