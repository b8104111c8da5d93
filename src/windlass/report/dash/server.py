"""Who may look? Only this machine (through an ssh tunnel), only with the token, only by reading, only what the pages need."""

from __future__ import annotations

import gzip
import hmac
import json
import secrets
import socket
import threading
from functools import lru_cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from windlass.errors import LaunchError
from windlass.figures.theme import DARK, LIGHT, css
from windlass.report.dash.api import NotFound, answer
from windlass.report.dash.store import Folder

STATIC = Path(__file__).parent / "static"
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip
ASSETS = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/draw.js": ("draw.js", "text/javascript"),
    "/planner.js": ("planner.js", "text/javascript"),
}


class Server(ThreadingHTTPServer):
    """Many viewers, one thread each; threads die with the server."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, folder: Folder, port: int, token: str) -> None:
        self.folder, self.token = folder, token
        super().__init__(("127.0.0.1", port), Handler)
        self.cookie = f"windlass{self.server_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that goes away in the middle of an answer is no event."""


def make_server(root: Path, *, port: int = 0, token: str | None = None) -> Server:
    """Bound to localhost; port 0 takes a free one. The token is new for every start."""
    try:
        return Server(Folder(root), port, token or secrets.token_urlsafe(24))
    except OSError as error:
        raise LaunchError(
            "report.port-localhost-cannot-used",
            f"port {port} on localhost cannot be used: {error.strerror}",
            hint="leave --port out to take a free one",
        ) from None


def serve_in_background(server: Server) -> threading.Thread:
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="windlass-dash", daemon=True
    )
    thread.start()
    return thread


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "windlass"
    sys_version = ""
    timeout = 60
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        self._respond(body=True)

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def _respond(self, *, body: bool) -> None:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=100)
        except ValueError:  # more than a hundred words, or brackets that never close
            self._send(HTTPStatus.BAD_REQUEST, b"this address cannot be read\n", "text/plain", body=body)
            return
        if not self._local_host():
            self._send(HTTPStatus.FORBIDDEN, b"this server answers to localhost only\n", "text/plain", body=body)
        elif not self._allowed(query):
            self._send(
                HTTPStatus.FORBIDDEN,
                b"open the address that `windlass dash` printed: it ends in ?token=...\n",
                "text/plain",
                body=body,
            )
        elif parts.path == "/" and "token" in query:
            self._enter(parts.fragment, body)
        else:
            self._page(parts.path, query, body)

    def _local_host(self) -> bool:
        """A name that only resolves to localhost (DNS rebinding) is not ours; the port is the tunnel's affair."""
        host = self.headers.get("Host", "")
        return any(host == name or host.startswith(f"{name}:") for name in LOCAL_NAMES)

    def _allowed(self, query: dict[str, list[str]]) -> bool:
        given = query.get("token", [""])[0] or self._cookie()
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return found.value if found else ""

    def _enter(self, fragment: str, body: bool) -> None:
        """The token moves from the address into a cookie, so that it stays out of the history and of screenshots."""
        cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", body=body, more={"Location": "/", "Set-Cookie": cookie})

    def _page(self, path: str, query: dict[str, list[str]], body: bool) -> None:
        if path in ASSETS:
            name, kind = ASSETS[path]
            self._send(HTTPStatus.OK, (STATIC / name).read_bytes(), kind, body=body)
        elif path == "/app.css":
            self._send(HTTPStatus.OK, stylesheet(), "text/css", body=body)
        elif path == "/plotly.js":
            self._send(
                HTTPStatus.OK,
                plotly(),
                "text/javascript",
                body=body,
                more={"Content-Encoding": "gzip", "Cache-Control": "max-age=86400"},
            )
        elif path.startswith("/api/"):
            self._api(path.removeprefix("/api/"), query, body)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"no such page\n", "text/plain", body=body)

    def _api(self, path: str, query: dict[str, list[str]], body: bool) -> None:
        try:
            status, value = HTTPStatus.OK, answer(self.server.folder, path, query)
        except NotFound as error:
            status, value = HTTPStatus.NOT_FOUND, {"error": f"not found: {error}"}
        except Exception as error:  # a half-copied folder must not take the page down; the text names no path
            status, value = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                {"error": f"{type(error).__name__} while reading the run folder"},
            )
        self._send(
            status,
            json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str).encode(),
            "application/json",
            body=body,
        )

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str, *, body: bool, more: dict[str, str] | None = None
    ) -> None:
        more = {"Cache-Control": "no-store", **(more or {})}
        if len(content) > 1400 and "gzip" in self.headers.get("Accept-Encoding", "") and "Content-Encoding" not in more:
            content, more["Content-Encoding"] = gzip.compress(content, 1), "gzip"
        self.send_response(status)
        charset = "" if kind == "application/json" else "; charset=utf-8"
        for name, value in {
            **HEADERS,
            "Content-Type": kind + charset,
            "Content-Length": str(len(content)),
            **more,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a request line may hold the token."""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


@lru_cache(maxsize=1)
def plotly() -> bytes:
    """Plotly's own file from the installed package: no network."""
    from plotly.offline import get_plotlyjs

    return gzip.compress(str(get_plotlyjs()).encode(), 6)


@lru_cache(maxsize=1)
def stylesheet() -> bytes:
    """The shared style sheet, a switch between light and dark, and the dashboard's own rules."""
    light, dark = ("".join(f"--{k}:{v};" for k, v in theme.items()) for theme in (LIGHT, DARK))
    switch = f':root[data-theme="light"]{{color-scheme:light;{light}}}\n:root[data-theme="dark"]{{color-scheme:dark;{dark}}}\n'
    return (css() + switch + (STATIC / "app.css").read_text()).encode()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
