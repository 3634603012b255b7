"""A server that speaks as much of wandb's protocol as one run needs, and misbehaves on request."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from typing import Any, Literal

Behaviour = Literal["ok", "rate limited", "hangs after start"]


class FakeWandb:
    """Listens on 127.0.0.1; `rows` holds the history lines that were uploaded, in order."""

    def __init__(self, behaviour: Behaviour = "ok") -> None:
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.requests = 0
        self._closed = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                fake.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                is_graphql = self.path == "/graphql"
                if behaviour == "rate limited":
                    self.reply({"error": "rate limit"}, 429)
                elif behaviour == "hangs after start" and not is_graphql:
                    fake._closed.wait()
                elif is_graphql:
                    self.reply({"data": fake.graphql(json.loads(body))})
                else:
                    if self.path.endswith("file_stream"):
                        fake.take_stream(json.loads(body))
                    self.reply({})

            do_GET = do_POST = do_PUT = answer

            def reply(self, answer: dict[str, Any], status: int = 200) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        variables = request.get("variables") or {}
        match request.get("operationName"):
            case "RunResumeStatus":
                return {"model": None}
            case "UpsertBucket":
                entity = {"id": "e", "name": "someone"}
                bucket = {
                    "id": "b",
                    "name": variables["name"],
                    "displayName": variables["displayName"],
                    "description": None,
                    "config": variables["config"],
                    "sweepName": None,
                    "project": {"id": "p", "name": variables["project"], "entity": entity},
                    "historyLineCount": 0,
                }
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}

    def take_stream(self, body: dict[str, Any]) -> None:
        files = body.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            # The offset is the line number: a chunk that is sent again replaces itself.
            self.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        if summary := files.get("wandb-summary.json"):
            self.summary = json.loads(summary["content"][-1])

    def __enter__(self) -> FakeWandb:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
