"""Addresses that no Ray head answers at: refused before Ray waits for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from hybridflow.cluster import connection
from hybridflow.errors import ConfigError


@contextmanager
def service(says: bytes, closes: bool = False) -> Iterator[int]:
    """A service of another kind, which says this to each client."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        clients = []

        def serve() -> None:
            try:
                while True:
                    client, _ = server.accept()
                    clients.append(client)
                    client.sendall(says)
                    if closes:
                        client.close()
            except OSError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in clients:
                client.close()


@pytest.mark.parametrize(
    "address",
    ["ray://127.0.0.1:10001", "127.0.0.1", "127.0.0.1:", ":6379", "127.0.0.1:no", "127.0.0.1:0", "127.0.0.1:65536",
     "http://127.0.0.1:6379", "127.0.0.1:-1", "auto ", "127.0.0.1:६३"],
)  # fmt: skip
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ConfigError, match=r"is not host:port|no Ray cluster answers"):
        connection.connect("session", address, None)


@pytest.mark.parametrize(
    ("says", "closes"),
    [(b"", False), (b"", True), (b"HTTP/1.1 400 Bad Request\r\n\r\n", True), (b"SSH-2.0-OpenSSH_9.6\r\n", False),
     (b"-ERR unknown command\r\n", False), (b"abc", False)],
)  # fmt: skip
def test_another_service_is_refused_within_the_deadline(says, closes, monkeypatch):
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.2)
    with service(says, closes) as port, pytest.raises(ConfigError, match="no Ray cluster answers at"):
        connection.connect("session", f"127.0.0.1:{port}", None)


def test_what_speaks_grpc_is_asked_further():
    with service(b"\0\0\6\4\0\0\0\0\0" + b"\0\3\x7f\xff\xff\xff") as port:
        connection._check_grpc("127.0.0.1", port)


def test_a_silent_grpc_service_is_refused_within_the_deadline(monkeypatch):
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.2)
    begun = time.monotonic()
    with (
        service(b"\0\0\6\4\0\0\0\0\0" + b"\0\3\x7f\xff\xff\xff") as port,
        pytest.raises(ConfigError, match="has not said which cluster it is in"),
    ):
        connection.connect("session", f"127.0.0.1:{port}", None)
    assert time.monotonic() - begun < 20  # Ray's own limit is 30 s


def test_another_grpc_service_is_refused():
    grpc = pytest.importorskip("grpc")  # not among Ray's own requirements
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ConfigError, match="another gRPC service"):
            connection.connect("session", f"127.0.0.1:{port}", None)
    finally:
        server.stop(None)
