"""``scripts/soak``: the random mixture for as long as asked, with what became of it."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys

from tests.faults.mixture import mixture


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=2.0, help="how long to go on (2)")
    parser.add_argument("--seed", type=int, help="repeat what chance chose with this seed")
    parser.add_argument("--players", type=int, default=200, help="concurrent sessions (200)")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    # Ended like Ctrl-C does, so that no server stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    on_terminal = sys.stdout.isatty()

    def say(line: str) -> None:
        print(f"\r\x1b[K{line}" if on_terminal else line, end="" if on_terminal else "\n", flush=True)

    print(f"seed {seed}: to repeat it, scripts/soak {arguments.minutes:g} --seed {seed}")
    with mixture(seed) as it:
        try:
            asyncio.run(it.run(arguments.minutes * 60, say, arguments.players))
            say("checking ...")
            it.end()
        except AssertionError as error:
            print(f"\n{error}\n\nNot as it should be. The server's log:\n{it.server.log()[-20000:]}")
            return 1
        except KeyboardInterrupt:
            print("\nstopped")
            return 130
        finally:
            say(it.tally.line())
            print("\nbroken: " + ", ".join(f"{name.replace('_', ' ')} {times}" for name, times in it.broken.items()))
            if it.tally.causes:
                print("causes: " + ", ".join(f"{cause} {times}" for cause, times in it.tally.causes.items()))
    print("Every request got the right answer, or an error that said what was lost. Nothing is left behind.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
