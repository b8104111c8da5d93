"""The dashboard under many idle connections and few file descriptors, in a process of its own."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import subprocess
import sys
import time

import pytest

SERVER = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from windlass.report.dash import server as module
module.UNAUTHENTICATED_SECONDS = float(sys.argv[2])
server = module.make_server(Path(sys.argv[1]))
print(server.server_port, server.token, flush=True)
server.serve_forever(poll_interval=0.1)
"""


@pytest.fixture
def start_server(run):
    processes = []

    def start(seconds: float) -> tuple[int, str]:
        argv = [sys.executable, "-c", SERVER, str(run.path.parent), str(seconds)]
        processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        port, token = processes[-1].stdout.readline().split()
        return int(port), token

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def open_idle(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]


def test_a_viewer_is_answered_while_idle_connections_take_the_descriptors(start_server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 1024)), hard))
    port, token = start_server(60)  # longer than the test: they are dropped by number
    headers = {"Cookie": f"windlass{port}={token}"}
    sockets = open_idle(port, 300)
    for _ in range(3):
        began = time.monotonic()
        viewer = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        viewer.request("GET", "/api/runs", headers=headers)
        answer = viewer.getresponse()
        rows = json.loads(answer.read())["runs"]
        assert (answer.status, rows[0]["step"]) == (200, 300)  # files of the run could be opened too
        assert time.monotonic() - began < 2
        sockets += open_idle(port, 50)
        viewer.request("GET", "/api/runs", headers=headers)  # who showed the token is not dropped
        assert viewer.getresponse().read()
        viewer.close()
    for one in sockets:
        one.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_without_the_token_is_closed_after_a_while(start_server):
    port, _ = start_server(0.3)
    (idle,) = open_idle(port, 1)
    idle.sendall(b"GET /")  # the first bytes of a request do not prolong it
    began = time.monotonic()
    assert idle.recv(1) == b""
    assert time.monotonic() - began < 5
    idle.close()


def test_a_refused_connection_is_closed(start_server):
    port, _ = start_server(60)
    (stranger,) = open_idle(port, 1)
    stranger.sendall(b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
    text = b""
    while block := stranger.recv(65536):
        text += block
    assert b"403" in text.splitlines()[0]
    stranger.close()
