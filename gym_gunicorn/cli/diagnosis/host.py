"""What is to be known of the machine: the folder for sockets, limits, packages, and other servers of this user."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol

from gym_gunicorn.cli.diagnosis.facts import Configuration, Folder, Host, Neighbour
from gym_gunicorn.cli.diagnosis.versions import unsupported
from gym_gunicorn.cli.servers import Where, find
from gym_gunicorn.forwarding.sockets import socket_path
from gym_gunicorn.lifecycle.socket_directory import PREFIX
from gym_gunicorn.owner import new_owner_id
from gym_gunicorn.settings import Settings


def host_facts(configuration: Configuration) -> Host:
    """Return what is to be known of this machine for a server that this user starts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder: Folder | None = None
    neighbours: list[Neighbour] = []
    if configuration.routing is not None:
        directory = configuration.routing.directory
        folder = folder_facts(directory, configuration.uid, configuration.gid)
        # Elsewhere there is no proc(5) to know them by.
        if sys.platform == "linux":
            neighbours = list(_neighbours({directory, Settings.directory}, configuration.bind))
    return Host(
        platform=sys.platform,
        euid=os.geteuid(),
        descriptors=soft if soft != resource.RLIM_INFINITY else sys.maxsize,
        folder=folder,
        neighbours=neighbours,
        unsupported=unsupported(importlib.metadata.requires("gym-gunicorn") or ()),
        websockets=AutoWebSocketsProtocol is not None,
        prometheus=importlib.util.find_spec("prometheus_client") is not None,
    )


def folder_facts(path: str, uid: int, gid: int) -> Folder:
    """Return what is to be known of the folder ``path``, for a server whose workers are ``uid`` and ``gid``."""
    longest = len(os.fsencode(socket_path(os.path.join(path, PREFIX + "x" * 8), new_owner_id())))
    try:
        status = os.stat(path)
        room = os.statvfs(path)
    except OSError as error:
        return Folder(path, trouble=f"{error.strerror}", longest=longest)
    trouble = ""
    if not stat.S_ISDIR(status.st_mode):
        trouble = "it is not a folder"
    elif not os.access(path, os.W_OK | os.X_OK):
        trouble = "this user can't write to it"
    return Folder(
        path=path,
        trouble=trouble,
        longest=longest,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        closed_to_uid=_closed(path, uid, gid) if uid not in (0, os.geteuid()) else "",
        free=room.f_bavail * room.f_frsize if room.f_blocks else None,
        free_files=room.f_favail if room.f_files else None,
    )


def _closed(path: str, uid: int, gid: int) -> str:
    """Return the first folder on the way to ``path`` that ``uid`` and ``gid`` can't enter."""
    real = Path(os.path.realpath(path))
    for folder in reversed((real, *real.parents)):
        status = folder.stat()
        bit = stat.S_IXOTH
        if status.st_uid == uid:
            bit = stat.S_IXUSR
        elif status.st_gid == gid:
            bit = stat.S_IXGRP
        if not status.st_mode & bit:
            return str(folder)
    return ""


def _neighbours(parents: set[str], bind: list[str]) -> Iterator[Neighbour]:
    """Yield the running servers of this user that have sessions, one for each secret that their workers sign with."""
    for server in (server for parent in sorted(parents) for server in find(Where(sockets=parent))):
        secrets = {reading["secret"] for reading in server.readings} - {0}
        addresses = {address for arbiter in server.arbiters for address in arbiter.addresses}
        same = bool(set(map(place, addresses)) & set(map(place, bind))) if addresses else None
        pid = server.arbiters[0].process.pid if server.arbiters else 0
        for secret in sorted(secrets):
            yield Neighbour(pid, server.directory, secret, same)


def place(address: str) -> str:
    """Return the port of an address that gunicorn binds or names, or the path of a Unix socket."""
    if address.startswith("unix:"):
        return os.path.abspath(address.removeprefix("unix:").removeprefix("//"))
    if address.startswith("fd://"):
        return address
    port = address.rpartition(":")[2]
    # gunicorn's own default.
    return port if port.isdigit() else "8000"
