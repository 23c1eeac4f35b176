"""A server on loopback that speaks what uploads to the Hugging Face hub need, and keeps what it is given. The client is
huggingface_hub's own, without its Xet transport."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_goodtokenofatest0123456789"


class HubServer(ThreadingHTTPServer):
    """`files` by repository and path; `refuses` are path endings that get the status beside them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.refuses: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any = None) -> None:
        data = json.dumps({} if body is None else body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path))
        for end, status in self.server.refuses.items():
            if path.endswith(end):
                return self.answer(status, {"error": "refused by the test"})
        if path.startswith("/large/"):  # a place that its address opens
            self.server.large[path.rpartition("/")[2]] = body
            return self.answer(200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        return self.answer(*self.found(path, body))

    do_GET = do_POST = do_PUT = do_HEAD = handle_one  # noqa: N815

    def found(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in self.server.repos else 200
            self.server.repos.setdefault(name, asked)
            return status, {"url": f"{self.server.url}/{name}"}
        if path == "/api/validate-yaml":
            head = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            good = isinstance(head, dict) and all(isinstance(tag, str) for tag in head["tags"])
            return 200 if good else 400, {"errors": [], "warnings": []}
        if path.endswith("/auth-check/write"):
            return 200, {}
        repo = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        if path.endswith("/tree/main"):
            return 200, [
                {"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.server.files.get(repo, ())
            ]
        if path.endswith("/preupload/main"):
            modes = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            found = [{"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")]} for f in files]
            return 200, {"files": [f | {"shouldIgnore": False} for f in found]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            places = [{"upload": {"href": f"{self.server.url}/large/{one['oid']}"}} for one in objects]
            return 200, {"objects": [one | {"actions": at} for one, at in zip(objects, places, strict=True)]}
        if path.endswith("/commit/main"):
            kept = self.server.files.setdefault(repo, {})
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    kept[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del kept[value["path"]]
                elif line["key"] == "lfsFile":
                    kept[value["path"]] = self.server.large[value["oid"]]
                    assert hashlib.sha256(kept[value["path"]]).hexdigest() == value["oid"]
            return 200, {"commitUrl": f"{self.server.url}/{repo}/commit/0", "commitOid": "0" * 40}
        return 404, {"error": f"this test server does not know {path}"}


@contextmanager
def served_hub(monkeypatch: Any, token: str | None = TOKEN) -> Iterator[HubServer]:
    """The hub of this process, with this token in the environment."""
    from huggingface_hub import constants

    hub = HubServer()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
