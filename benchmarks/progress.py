"""What is shown while it runs: how much is done, how long it took, how long it may take yet."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts steps to a total; on a terminal in one line that is rewritten, otherwise a line every twentieth.

    Args:
        total: the number of steps to come; some may count as more than one, or as less.
    """

    def __init__(self, total: float) -> None:
        self.total = total
        self.done = 0.0
        self._began = time.monotonic()
        self._shown = 0

    def say(self, text: str) -> None:
        """Print a line that stays."""
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)

    def step(self, text: str, steps: float = 1) -> None:
        """Note that ``steps`` more are done, and show what is being done."""
        self.done += steps
        elapsed = time.monotonic() - self._began
        remaining = elapsed / self.done * (self.total - self.done) if self.done else 0.0
        line = f"{self.done / self.total:4.0%}  {_clock(elapsed)} elapsed, {_clock(remaining)} remaining  {text}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line[:110]}", end="", file=sys.stderr, flush=True)
        elif int(self.done * 20 / self.total) > self._shown:
            self._shown = int(self.done * 20 / self.total)
            print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
