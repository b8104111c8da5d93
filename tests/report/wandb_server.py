"""As much of a W&B server as `wandb sync` talks to: it knows one run, keeps the lines of its files by offset, and tells a resumed upload where it stands."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "windlass", "entity": {"id": "e", "name": "me"}}


class WandbServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, list[str]] = {}
        self.bucket: dict[str, Any] = {}
        self.uploads = 0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that ends without a farewell is no event."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.get("wandb-history.jsonl", [])]

    def answer(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        if name == "RunResumeStatus":
            return {"model": {**PROJECT, "bucket": self._resume() if self.bucket else None}}
        if name == "UpsertBucket":
            self.bucket |= {"id": "UnVuOjE=", "name": variables.get("name"), "displayName": "shown", "config": variables.get("config") or "{}"}  # fmt: skip
            shown = {**self.bucket, "description": "", "sweepName": None, "project": PROJECT, "historyLineCount": len(self.history())}  # fmt: skip
            return {"upsertBucket": {"bucket": shown, "inserted": True}}
        if name == "CreateRunFiles":
            made = [{"name": f, "uploadUrl": f"{self.url}/upload/{f}"} for f in variables.get("files", [])]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": made}}
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}, "serverInfo": {"features": []}}  # fmt: skip

    def _resume(self) -> dict[str, Any]:
        history, events = (self.files.get(f"wandb-{name}.jsonl", []) for name in ("history", "events"))
        return {
            **self.bucket, "summaryMetrics": (self.files.get("wandb-summary.json") or ["{}"])[-1], "logLineCount": 0, "historyLineCount": len(history),
            "eventsLineCount": len(events), "historyTail": json.dumps(history[-1:]), "eventsTail": json.dumps(events[-1:]), "tags": [], "notes": "",
            "wandbConfig": "{}",
        }  # fmt: skip

    def store(self, body: dict[str, Any]) -> None:
        for name, part in (body.get("files") or {}).items():
            self.files.setdefault(name, [])[part["offset"] :] = part["content"]
        self.uploads += bool(body.get("complete"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_GET(self) -> None:
        self._send({})

    def do_PUT(self) -> None:
        self._body()
        self._send({})

    def do_POST(self) -> None:
        raw = self._body()
        if self.path.startswith("/graphql"):
            asked = json.loads(raw)
            self._send({"data": self.server.answer(asked.get("operationName") or "", asked.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self.server.store(json.loads(raw))
            self._send({"limits": {}})
        else:
            self._send({})  # W&B's own telemetry

    def _body(self) -> bytes:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

    def _send(self, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""
