"""The dashboard's server: localhost only (through an ssh tunnel), only with the token. It writes notes.json of a
run and nothing else."""

import contextlib
import gzip
import hmac
import json
import resource
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from windlass.errors import LaunchError
from windlass.figures.html import PLOTS
from windlass.figures.theme import DARK, LIGHT, css
from windlass.files import json_safe
from windlass.report.dash.api import NotFound, answer, save_notes
from windlass.report.dash.store import Folder

STATIC = Path(__file__).parent / "static"
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip


# Connections that have not shown the token yet. Anybody on the host can open them, and each takes a file descriptor
# that run folders and viewers need: there are few, for a short time, and at most a quarter of the descriptors.
MAX_UNAUTHENTICATED = 64
UNAUTHENTICATED_SECONDS = 10.0
MAX_SENT_BYTES = 32 << 10


class DashServer(ThreadingHTTPServer):
    """Many viewers, one thread each; threads die with the server."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, folder: Folder, port: int, token: str) -> None:
        self.folder, self.token = folder, token
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, float] = {}  # with the time of arrival, oldest first
        super().__init__(("127.0.0.1", port), DashHandler)
        self.cookie = f"windlass{self.server_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().get_request()
        except OSError:  # no descriptor is free: drop the oldest, and accept at the next turn
            self._drop_idle(at_most=len(self._unauthenticated) - 1)
            time.sleep(0.01)
            raise
        with self._lock:
            self._unauthenticated[connection] = time.monotonic()
        self._drop_idle(at_most=min(MAX_UNAUTHENTICATED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        return connection, address

    def service_actions(self) -> None:
        """Called several times a second."""
        self._drop_idle(at_most=MAX_UNAUTHENTICATED)

    def shutdown_request(self, request: Any) -> None:
        self.authenticated(request)
        super().shutdown_request(request)

    def authenticated(self, connection: socket.socket) -> None:
        """It showed the token, or is closed: no longer counted and never dropped."""
        with self._lock:
            self._unauthenticated.pop(connection, None)

    def _drop_idle(self, *, at_most: int) -> None:
        """Close connections without the token that are too old or too many, the oldest first.

        Its thread may not have read yet what a new viewer sent: a connection with unread bytes is dropped last.
        """
        with self._lock:
            oldest = time.monotonic() - UNAUTHENTICATED_SECONDS
            dropped = [c for c, arrived_at in self._unauthenticated.items() if arrived_at < oldest]
            if (excess := len(self._unauthenticated) - len(dropped) - max(0, at_most)) > 0:
                young = [c for c in self._unauthenticated if c not in dropped]
                poll = select.poll()
                for connection in young:
                    poll.register(connection, select.POLLIN)
                waiting = {number for number, _ in poll.poll(0)}
                dropped += sorted(young, key=lambda c: c.fileno() in waiting)[:excess]
            for connection in dropped:
                del self._unauthenticated[connection]
                with contextlib.suppress(OSError):  # wakes its thread, which closes it
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer may go away in the middle of an answer."""


def make_server(root: Path, *, port: int = 0, token: str | None = None) -> DashServer:
    """Bound to localhost; port 0 takes a free one. The token is new at every start."""
    try:
        return DashServer(Folder(root), port, token or secrets.token_urlsafe(24))
    except OSError as error:
        raise LaunchError(
            "report.port-not-available",
            f"port {port} on localhost cannot be used: {error.strerror}",
            hint="omit --port to take a free one",
        ) from None


def serve_in_background(server: DashServer) -> threading.Thread:
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="windlass-dash", daemon=True
    )
    thread.start()
    return thread


class DashHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "windlass"
    sys_version = ""
    timeout = 60
    disable_nagle_algorithm = True
    server: DashServer

    def do_GET(self) -> None:
        if (admitted := self._admit()) is None:
            return
        path, query = admitted
        if path == "/" and "token" in query:
            # The token moves into a cookie, so that it stays out of the history and of screenshots.
            text = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": text})
        elif path in ASSETS:
            content, kind, *headers = ASSETS[path]
            self._send(HTTPStatus.OK, content(), kind, *headers)
        elif path.startswith("/api/"):
            self._api(lambda: answer(self.server.folder, path.removeprefix("/api/"), query))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def do_POST(self) -> None:
        """The notes of a run. Another site's page cannot send them: it has another origin, and not our cookie."""
        if (admitted := self._admit()) is None:
            return
        path, query = admitted
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
            self._refuse(HTTPStatus.FORBIDDEN, "only the pages of this server may write")
        elif path != "/api/notes":
            self._refuse(HTTPStatus.NOT_FOUND, "only notes can be written")
        elif self.headers.get("Content-Type") != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "notes are sent as application/json")
        elif not (length.isdecimal() and len(length) < 8 and int(length) <= MAX_SENT_BYTES):
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"notes have at most {MAX_SENT_BYTES:,} bytes")
        else:
            body = self.rfile.read(int(length))
            self._api(lambda: save_notes(self.server.folder, query, body))

    def _admit(self) -> tuple[str, dict[str, list[str]]] | None:
        """Path and query of a request to localhost with the token; others are refused here."""
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=100)
        except ValueError:  # more than a hundred fields, or brackets that never close
            self._refuse(HTTPStatus.BAD_REQUEST, "this address is not valid")
            return None
        host = self.headers.get("Host", "")
        cookies: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            cookies.load(self.headers.get("Cookie", ""))
        cookie = cookies.get(self.server.cookie)
        token = query.get("token", [""])[0] or (cookie.value if cookie else "")
        # A name that only resolves to localhost (DNS rebinding) is refused; the port belongs to the tunnel.
        if not any(host == name or host.startswith(f"{name}:") for name in LOCAL_NAMES):
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers to localhost only")
            return None
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that `windlass dash` printed: it ends in ?token=...")
            return None
        self.server.authenticated(self.connection)
        return parts.path, query

    def _api(self, call: Callable[[], dict[str, Any] | str]) -> None:
        status, value = HTTPStatus.OK, None
        try:
            value = call()
        except NotFound as error:
            status, value = HTTPStatus.NOT_FOUND, {"error": f"not found: {error}"}
        except Exception as error:  # a half-copied folder must not take the page down; the text names no path
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            value = {"error": f"{type(error).__name__} while reading the run folder"}
        if isinstance(value, str):
            self._send(status, value.encode(), "text/csv", {"Content-Disposition": "attachment"})
            return
        text = json.dumps(json_safe(value), separators=(",", ":"), allow_nan=False, default=str)
        self._send(status, text.encode(), "application/json")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """The connection is closed: whoever shows no token gets no second request on it."""
        self._send(status, f"{text}\n".encode(), "text/plain", {"Connection": "close"})

    def _send(self, status: HTTPStatus, content: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        charset = "" if kind == "application/json" else "; charset=utf-8"
        headers = {**HEADERS, "Content-Type": kind + charset, "Cache-Control": "no-store", **(more or {})}
        takes_gzip = "gzip" in self.headers.get("Accept-Encoding", "") and "Content-Encoding" not in headers
        if takes_gzip and len(content) > 1400:
            content, headers["Content-Encoding"] = gzip.compress(content, 1), "gzip"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a request line may hold the token."""


@lru_cache(maxsize=1)
def plotly() -> bytes:
    """Plotly's script from the installed package, compressed: no network."""
    from plotly.offline import get_plotlyjs

    return gzip.compress(str(get_plotlyjs()).encode(), 6)


@lru_cache(maxsize=1)
def stylesheet() -> bytes:
    """The shared style sheet, a switch between light and dark, and the dashboard's own rules."""
    colours = {
        name: "".join(f"--{key}:{value};" for key, value in theme.items())
        for name, theme in (("light", LIGHT), ("dark", DARK))
    }
    rules = [f':root[data-theme="{name}"]{{color-scheme:{name};{text}}}\n' for name, text in colours.items()]
    return "".join([css(), *rules, (STATIC / "app.css").read_text()]).encode()


SCRIPTS = ("app", "draw", "runs", "run", "planner")
# Path -> (content, type, further headers)
ASSETS: dict[str, tuple[Any, ...]] = {
    "/": ((STATIC / "index.html").read_bytes, "text/html"),
    **{f"/{name}.js": ((STATIC / f"{name}.js").read_bytes, "text/javascript") for name in SCRIPTS},
    "/plots.js": (PLOTS.read_bytes, "text/javascript"),
    "/app.css": (stylesheet, "text/css"),
    "/plotly.js": (plotly, "text/javascript", {"Content-Encoding": "gzip", "Cache-Control": "max-age=86400"}),
}
