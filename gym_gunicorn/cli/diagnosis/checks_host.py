"""What the machine means for a server: the folder for its sockets, limits, packages, other servers."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from gym_gunicorn.cli.diagnosis.facts import App, Configuration, Folder, Host
from gym_gunicorn.cli.diagnosis.findings import Finding
from gym_gunicorn.forwarding.sockets import MAX_PATH

_ANOTHER_FOLDER = "Set SessionRouting(directory=...) to a folder"

# Below this many descriptors even a small server can run out.
_FEW_DESCRIPTORS = 1024
_LITTLE_ROOM = 1024 * 1024


def check_host(configuration: Configuration, host: Host, app: App | None) -> Iterator[Finding]:
    """Find what the machine is lacking."""
    if host.platform != "linux":
        yield Finding(
            "warning",
            "platform",
            f"This is {host.platform}, not Linux: a dead worker is noticed by refused connections alone, and not while "
            "a child that it forked holds its socket open.",
        )
    if host.unsupported:
        yield Finding(
            "warning",
            "versions",
            f"Packages of versions that this release was not made for: {', '.join(host.unsupported)}.",
            "pip install --upgrade gym-gunicorn brings what fits together.",
        )
    if not host.websockets:
        uses = app is not None and app.websockets
        yield Finding(
            "warning" if uses else "note",
            "websockets",
            "WebSockets can't be served: neither websockets nor wsproto is installed"
            + (", and the app has WebSocket routes." if uses else "."),
            "pip install 'gym-gunicorn[websockets]'",
        )
    routing = configuration.routing
    if routing is not None and routing.metrics and not host.prometheus:
        yield Finding(
            "error",
            "metrics",
            "SessionRouting(metrics_path=...) is set, and what it needs is not installed: that path will fail.",
            "pip install 'gym-gunicorn[metrics]'",
        )


def check_sockets(configuration: Configuration, host: Host) -> Iterator[Finding]:
    """Find what stands in the way of private sockets, for a server that is to be routed."""
    if host.folder is not None:
        yield from _check_folder(host.folder, configuration, host.euid)
    routing = configuration.routing
    if routing is None:
        return
    # A forward has a descriptor here and one there, beside that of the caller.
    needed = 2 * routing.max_forwards + 100
    if host.descriptors < needed:
        yield Finding(
            "warning" if host.descriptors < _FEW_DESCRIPTORS else "note",
            "descriptors",
            f"A process may have {host.descriptors} files and connections open (ulimit -n), and max_forwards="
            f"{routing.max_forwards} can need {needed} and more: callers and forwards are refused when none is left.",
            "Raise it (ulimit -n 65536, or LimitNOFILE= in a systemd unit), or lower max_forwards.",
        )


def check_neighbours(host: Host, fingerprints: set[int]) -> Iterator[Finding]:
    """Find running servers that sign sessions as this one will, whose cookies have one of ``fingerprints``."""
    for neighbour in host.neighbours:
        if neighbour.fingerprint not in fingerprints:
            continue
        who = f"A server that is running (arbiter pid {neighbour.pid}, sockets in {neighbour.directory})"
        if neighbour.same_address:
            yield Finding("ok", "running", f"{who} listens on the same address: it is taken for this one.")
            continue
        yield Finding(
            "warning" if neighbour.same_address is False else "note",
            "same-secret",
            f"{who} has the same cookie name and secret: a client that talks to both (browsers send cookies to "
            "every port of a host) gets 410 from each for sessions of the other.",
            "Give them different session_cookie names.",
        )


def _check_folder(folder: Folder, configuration: Configuration, euid: int) -> Iterator[Finding]:
    if folder.longest > MAX_PATH:
        yield Finding(
            "error",
            "path-too-long",
            f"The server will not start: a private socket's path in {folder.path!r} would have {folder.longest} bytes, "
            f"and Unix sockets allow {MAX_PATH}.",
            f"{_ANOTHER_FOLDER} with a shorter path.",
        )
    if folder.trouble:
        yield Finding(
            "error",
            "folder",
            f"The server will not start: sockets can't be made in {folder.path!r}: {folder.trouble}.",
            f"{_ANOTHER_FOLDER} that exists and that this user can write to.",
        )
        return
    if folder.closed_to_uid:
        yield Finding(
            "error",
            "folder-closed",
            f"Workers run as user {configuration.uid}, who can't enter {folder.closed_to_uid!r}, and so can't make "
            f"sockets below {folder.path!r}.",
            f"{_ANOTHER_FOLDER} that this user can reach, such as /tmp.",
        )
    if folder.free == 0 or folder.free_files == 0:
        yield Finding(
            "error",
            "folder-full",
            f"The server will not start: there is no room left in {folder.path!r}.",
            "Make room, or set SessionRouting(directory=...) to a folder that has some.",
        )
    elif folder.free is not None and folder.free < _LITTLE_ROOM:
        yield Finding(
            "warning",
            "folder-full",
            f"There is little room left in {folder.path!r}: {folder.free} bytes.",
            "Make room.",
        )
    if folder.mode & stat.S_IWOTH and not folder.mode & stat.S_ISVTX:
        yield Finding(
            "warning",
            "folder-open",
            f"Everybody can write to {folder.path!r}, which has no sticky bit: any user can move the socket directory "
            "away, and end the sessions.",
            f"chmod +t {folder.path}, or {_ANOTHER_FOLDER[0].lower()}{_ANOTHER_FOLDER[1:]} of this user's own.",
        )
    if folder.uid not in (0, euid, configuration.uid):
        yield Finding(
            "warning",
            "folder-of-another",
            f"{folder.path!r} belongs to user {folder.uid}, who can remove the socket directory, and end the sessions.",
            f"{_ANOTHER_FOLDER} of this user's own, or root's.",
        )
    yield Finding(
        "ok",
        "sockets",
        f"Private sockets will be in {folder.path}/gym-gunicorn-XXXXXXXX/, which the workers' user alone may enter.",
    )
