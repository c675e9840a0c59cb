"""The ways to serve the app that are compared: each a name and a configuration text.

What is configured is what a careful user would: kept-alive connections on every hop, no access log, streaming.
"""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import dataclass, replace
from typing import Any, Literal

from gym_gunicorn.settings import SettingError, Settings

STOCK = """\
worker_class = "uvicorn_worker.UvicornWorker"
"""

OURS = """\
from gym_gunicorn import SessionRouting
from gym_gunicorn.conf import *

routing = SessionRouting(@arguments@directory="@folder@")
globals().update({name: getattr(routing, name) for name in SessionRouting.HOOKS})
"""

HAPROXY = """\
global
    nbthread @cores@
defaults
    mode http
    timeout connect 10s
    timeout client 1h
    timeout server 1h
    timeout tunnel 1h
    timeout http-keep-alive 1h
    http-reuse always
frontend callers
    bind 127.0.0.1:@port@
    default_backend workers
backend workers
    balance roundrobin
"""

HAPROXY_TABLE = """\
    stick-table type string len 255 size 1m expire 1h
    stick match req.cook(session)
    stick store-response res.cook(session)
@servers:    server s@number@ 127.0.0.1:@port@@
"""

HAPROXY_COOKIE = """\
    cookie SERVER insert indirect nocache
@servers:    server s@number@ 127.0.0.1:@port@ cookie s@number@@
"""

NGINX = """\
@user@
daemon off;
worker_processes @cores@;
pid @folder@/pid;
error_log stderr warn;
events { worker_connections 8192; }
http {
    access_log off;
    client_body_temp_path @folder@/body;
    proxy_temp_path @folder@/proxy;
    fastcgi_temp_path @folder@/fastcgi;
    uwsgi_temp_path @folder@/uwsgi;
    scgi_temp_path @folder@/scgi;
    map $http_upgrade $connection_upgrade { default upgrade; '' ''; }
    upstream workers {
        hash $cookie_session consistent;
@servers:        server 127.0.0.1:@port@;@
        keepalive 256;
        keepalive_requests 1000000000;
    }
    server {
        listen 127.0.0.1:@port@ backlog=2048;
        keepalive_timeout 1h;
        keepalive_requests 1000000000;
        client_max_body_size 0;
        location / {
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_read_timeout 1h;
            proxy_send_timeout 1h;
        }
    }
}
"""


@dataclass(frozen=True)
class Setup:
    """One way to serve the app.

    Args:
        name: what ``--setups`` calls it.
        title: what the report calls it; ``{workers}`` stands for their number.
        kind: what the text configures: gunicorn alone, or a proxy before gunicorn servers of one stock worker each.
        text: the configuration; ``servers`` fills in what stands between @.
        one: whether it has one worker, however many the others have.
        keeps: whether a session's requests all reach the worker that holds it. Where they don't, wrong answers
            are counted, and the speed is reported all the same.
        missing: why it can't be measured here, or an empty string.
        only: the names of the works that it takes part in; none: in all.
    """

    name: str
    title: str
    kind: Literal["gunicorn", "haproxy", "nginx"]
    text: str
    one: bool = False
    keeps: bool = True
    missing: str = ""
    only: frozenset[str] = frozenset()

    @property
    def shares_listener(self) -> bool:
        """Whether callers connect to the workers themselves, and to which of them is the kernel's choice."""
        return self.kind == "gunicorn" and not self.one

    @property
    def is_ours(self) -> bool:
        return "SessionRouting" in self.text


def setups() -> dict[str, Setup]:
    """Return all set-ups by name, those that can't be measured here included."""
    haproxy = _missing("haproxy", "haproxy")
    nginx = _missing("nginx", "nginx-light")
    # A version that has one way to forward has no setting for it.
    aiohttp: dict[str, Any] = {"forwarder": "aiohttp"} if "forwarder" in Settings.__dataclass_fields__ else {}
    return {
        setup.name: setup
        for setup in (
            Setup("one", "1 unrouted worker", "gunicorn", STOCK, one=True),
            Setup("stock", "{workers} stock workers", "gunicorn", STOCK, keeps=False),
            _ours("ours-framed", "{workers} routed workers, framed", {"forwarder": "framed"}),
            _ours("ours-aiohttp", "{workers} routed workers, aiohttp", aiohttp),
            replace(
                _ours("ours-balanced", "{workers} routed workers, balanced", {"placement": "balanced"}),
                only=frozenset({"as-they-fall"}),
            ),
            Setup("haproxy-table", "HAProxy, stick table", "haproxy", HAPROXY + HAPROXY_TABLE, missing=haproxy),
            Setup("haproxy-cookie", "HAProxy, inserted cookie", "haproxy", HAPROXY + HAPROXY_COOKIE, missing=haproxy),
            Setup("nginx-hash", "nginx, hashed cookie", "nginx", NGINX, missing=nginx),
        )
    }


def again(setup: Setup) -> Setup:
    """Return the set-up under another name: measured against itself, it shows what a ratio is worth."""
    return replace(setup, name=f"{setup.name}-again", title=f"{setup.title}, again")


def program(name: str) -> str | None:
    """Return the path of a program, which Debian may keep where only root looks for it."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


def nginx_user() -> str:
    """Return the line that lets root's nginx read its folder: as root it would change to another user."""
    return f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""


def _missing(command: str, package: str) -> str:
    return "" if program(command) else f"{command} is not installed (Debian: apt install {package})"


def _ours(name: str, title: str, arguments: dict[str, Any]) -> Setup:
    text = OURS.replace("@arguments@", "".join(f"{key}={value!r}, " for key, value in arguments.items()))
    missing = ""
    try:
        Settings(**arguments)
    except (TypeError, SettingError):
        missing = (
            f"this version has no SessionRouting({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        )
    return Setup(name, title, "gunicorn", text, missing=missing)
