"""``gym-gunicorn metrics``: the figures of a server in Prometheus' text format."""

from __future__ import annotations

import argparse
import sys

from gym_gunicorn.cli.servers import Where, find
from gym_gunicorn.cli.status import not_found


def run(arguments: argparse.Namespace) -> int:
    """Write the metrics of the one server there is; return 1 where there is none, and 2 where there are several."""
    from gym_gunicorn.metrics.prometheus import render

    where = Where(arguments.sockets, arguments.pid)
    servers = find(where)
    if not servers:
        print(not_found(where), file=sys.stderr)
        return 1
    if len(servers) > 1:
        print("Several servers run here: choose one by --sockets or --pid", file=sys.stderr)
        for server in servers:
            names = ", ".join(f"{arbiter.name} (pid {arbiter.process.pid})" for arbiter in server.arbiters)
            print(f"  --sockets {server.directory}  {names}", file=sys.stderr)
        return 2
    sys.stdout.buffer.write(render(servers[0].readings, servers[0].total))
    sys.stdout.flush()
    return 0
