"""Running pairs of workers, one for each configuration of a module."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.difference.exchange import BOTH_PROTOCOLS, MATRIX, Pair, running_pair


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a self-signed certificate and of its key."""
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command = ["openssl", "req", *options.split(), "-out", certificate, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module", params=MATRIX, ids=str)
def pair(request: pytest.FixtureRequest, certificate: tuple[str, str]) -> Iterator[Pair]:
    """A pair of workers in each configuration: protocol, with or without TLS, kind of listener."""
    with running_pair(request.param, certificate) as pair:
        yield pair


@pytest.fixture(scope="module", params=BOTH_PROTOCOLS, ids=str)
def plain_pair(request: pytest.FixtureRequest, certificate: tuple[str, str]) -> Iterator[Pair]:
    """A pair of workers for each protocol, over TCP and without TLS."""
    with running_pair(request.param, certificate) as pair:
        yield pair
