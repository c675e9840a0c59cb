"""The picture that ``status`` shows. Needs the extra ``cli``."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gym_gunicorn.cli.servers import SILENT, Server, Where, Worker, find
from gym_gunicorn.cli.words import duration, several

# Without a terminal there is no width to keep to.
_ENDLESS = 1000

_LOOKS = {"serving": "green", "starting": "yellow", "stopping": "yellow"}
_LATE = 0.1

Cell = Callable[[Worker], Text | str]


def console() -> Console:
    """Return what to print on: a terminal, or a pipe, which gets whole lines and no colours."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=_ENDLESS)


def watch(where: Where, interval: float) -> None:
    """Show the servers again and again, until interrupted."""
    screen = console()
    if not screen.is_terminal:
        while True:
            screen.print(_now(where, screen.width))
            screen.file.flush()
            time.sleep(interval)
    with Live(_now(where, screen.width), console=screen, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_now(where, screen.width), refresh=True)


def _now(where: Where, width: int) -> RenderableType:
    from gym_gunicorn.cli.status import not_found

    servers = find(where)
    return Group(Text(time.strftime("%H:%M:%S"), "dim"), table(servers, width) if servers else Text(not_found(where)))


def table(servers: list[Server], width: int) -> RenderableType:
    """Return the picture of the servers, which fits into ``width`` columns as far as it can."""
    blocks: list[RenderableType] = []
    for server in servers:
        if blocks:
            blocks.append(Text())
        blocks += [_heading(server), Text(f"sockets {server.directory}", "dim"), _workers(server, width)]
    return Group(*blocks)


def _heading(server: Server) -> Text:
    lines = []
    for arbiter in server.arbiters:
        facts = [
            f"arbiter {arbiter.process.pid}",
            " ".join(arbiter.addresses) or "no address",
            several(len(server.workers) if len(server.arbiters) == 1 else arbiter.workers, "worker"),
            several(arbiter.reloads, "reload"),
            f"up {duration(arbiter.process.age())}",
        ]
        lines.append(Text.assemble((arbiter.name or "gunicorn", "bold"), "  ", "  ".join(facts)))
    if not lines:
        lines.append(Text("No arbiter is left: these workers end by themselves", "bold red"))
    uneven = server.unevenness()
    if uneven is not None and len(server.workers) > 1:
        advice = '; SessionRouting(placement="balanced") evens new sessions out' if server.wants_placement() else ""
        lines.append(Text(f"the busiest worker has stamped {uneven:.1f} times the mean{advice}", "dim"))
    return Text("\n").join(lines)


def _workers(server: Server, width: int) -> RenderableType:
    pss = all(worker.process is None or worker.process.pss is not None for worker in server.workers)
    columns: dict[str, Cell] = {
        "owner": lambda worker: worker.owner_id,
        "pid": _figure("pid"),
        "state": _state,
        "age": lambda worker: "-" if worker.process is None else duration(worker.process.age()),
        "PSS" if pss else "RSS": lambda worker: _memory(worker, pss),
        **{name: _figure(name) for name in ("stamped", "active", "local", "forwarded", "received", "gone")},
        "errors": lambda worker: "-" if worker.reading is None else _bad(str(worker.errors), worker.errors > 0),
        "loop lag": _lag,
    }
    # What a narrow terminal has no room for, the least missed first.
    dropped: list[str] = []
    spare = ["received", "local", "PSS" if pss else "RSS", "age", "forwarded", "active"]
    made = _table(server, columns)
    while spare and Measurement.get(Console(width=_ENDLESS), Console(width=_ENDLESS).options, made).maximum > width:
        dropped.append(spare.pop(0))
        del columns[dropped[-1]]
        made = _table(server, columns)
    if not dropped:
        return made
    return Group(made, Text(f"A wider terminal shows more: {', '.join(dropped)}", "dim"))


def _table(server: Server, columns: dict[str, Cell]) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", footer_style="dim")
    # Counters of the whole server, those of ended workers included; the others are of now.
    sums = server.sums()
    feet = {name: str(value) for name, value in sums.items()} | {
        "owner": "all",
        "active": str(sum(reading["active"] for reading in server.readings)),
        "errors": str(sums["busy"] + sums["broken"] + sums["truncated"]),
    }
    for name in columns:
        justify = "left" if name in ("owner", "state") else "right"
        made.add_column(name, feet.get(name, ""), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for worker in server.workers:
        made.add_row(*(cell(worker) for cell in columns.values()))
    if server.total is not None:
        ended = server.total
        cells = {name: str(ended[name]) for name in ("stamped", "local", "forwarded", "received", "gone")}
        cells |= {"owner": "ended", "errors": str(ended["busy"] + ended["broken"] + ended["truncated"])}
        made.add_row(*(cells.get(name, "") for name in columns), style="dim")
    made.show_footer = True
    return made


def _figure(name: str) -> Cell:
    return lambda worker: "-" if worker.reading is None else str(worker.reading[name])


def _state(worker: Worker) -> Text:
    state = worker.state
    if worker.reading is None:
        return Text("no figures", "red")
    silence = worker.reading.silence()
    since = f" {duration(silence)}" if state != "dead" and silence > SILENT else ""
    return Text(state + since, _LOOKS.get(state, "bold red"))


def _memory(worker: Worker, pss: bool) -> str:
    if worker.process is None:
        return "-"
    memory = worker.process.pss if pss else worker.process.rss
    return "-" if memory is None else f"{memory / 2**20:.0f} MiB"


def _lag(worker: Worker) -> Text | str:
    if worker.reading is None:
        return "-"
    # It is measured when the loop goes round.
    lag = worker.reading.silence() if worker.state in ("silent", "stopped") else worker.reading["lag"] / 1e9
    return _bad(f"{lag * 1000:.0f} ms" if lag < 1 else duration(lag), lag > _LATE)


def _bad(text: str, bad: bool) -> Text:
    return Text(text, "bold red" if bad else "")
