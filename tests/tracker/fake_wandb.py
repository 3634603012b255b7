"""A server that speaks as much of wandb's protocol as runs need, and misbehaves on request."""

from __future__ import annotations

import gzip
import http.server
import itertools
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

Behaviour = Literal[
    "ok",
    "rate limited",  # 429 to everything
    "rate limited at first",  # 429 to the first rows
    "hangs",
    "hangs after start",
    "dies in the middle",  # takes the first rows, and no connection after them
    "refuses rows",  # says no for good
    "refuses files",  # takes their names and no content
]


@dataclass
class FakeRun:
    """What arrived of one run; `rows` holds the history lines in order."""

    variables: dict[str, Any]  # of its last upsert
    rows: list[dict[str, Any]] = field(default_factory=list)
    lines_sent: int = 0  # also those that were sent again
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    preempting: bool = False


class FakeWandb:
    """Listens on 127.0.0.1; `runs` holds what was uploaded, by run id. `behaviour` may be changed
    on the way."""

    def __init__(self, behaviour: Behaviour = "ok", sweep: dict[str, Any] | None = None) -> None:
        self.behaviour = behaviour
        self.sweep = sweep  # a sweep file, whose grid its agent gets
        self.asked = 0  # points that the agent got
        self.runs: dict[str, FakeRun] = {}
        self.files: dict[str, bytes] = {}  # besides rows, by name
        self.views: list[dict[str, Any]] = []  # saved workspaces
        self.requests = 0
        self.deleted: set[str] = set()  # run ids that cannot be used again
        self._refusals = 2
        self._closed = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                fake.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                self.reply(*fake.answer(self.path, body))

            do_GET = do_POST = do_PUT = answer

            def reply(self, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, request: Any, address: Any) -> None:
                if not isinstance(sys.exc_info()[1], ConnectionError):  # wandb hangs up as it likes
                    super().handle_error(request, address)

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def run(self) -> FakeRun:
        """The only run."""
        (run,) = self.runs.values()
        return run

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        is_rows = path.endswith("file_stream")
        has_rows = is_rows and "wandb-history.jsonl" in (json.loads(body).get("files") or {})
        match self.behaviour:
            case "rate limited":
                return 429, {"error": "rate limit"}
            case "rate limited at first" if has_rows and self._refusals:
                self._refusals -= 1
                return 429, {"error": "rate limit"}
            case "hangs":
                self._closed.wait()
            case "hangs after start" if path != "/graphql":
                self._closed.wait()
            case "refuses rows" if is_rows:
                return 403, {"error": "no"}
        if path == "/graphql":
            return self.graphql(json.loads(body))
        if is_rows:
            self.take_stream(self.runs[path.split("/")[-2]], json.loads(body))
            if has_rows and self.behaviour == "dies in the middle":
                self._server.shutdown()
                self._server.server_close()
                self._closed.wait()
        if path.startswith("/put/"):
            if self.behaviour == "refuses files":
                return 403, {"error": "no"}
            self.files[unquote(path.removeprefix("/put/"))] = body
        return 200, {}

    def graphql(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        variables = request.get("variables") or {}
        entity = {"id": "e", "name": "someone"}
        named = re.search(r"\b(?:query|mutation) (\w+)", request["query"])
        match named and named[1]:
            case "RunResumeStatus":
                run = self.runs.get(variables["name"])
                bucket = run and {
                    "id": "b",
                    "name": variables["name"],
                    "summaryMetrics": json.dumps(run.summary),
                    "displayName": run.variables["displayName"],
                    "logLineCount": 0,
                    "historyLineCount": len(run.rows),
                    "eventsLineCount": 0,
                    "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
                    "eventsTail": "[]",
                    "config": json.dumps(run.config),
                    "tags": run.variables.get("tags") or [],
                    "notes": run.variables.get("notes"),
                    "wandbConfig": json.dumps({"t": {}}),
                }
                return 200, {
                    "data": {"model": {"id": "p", "name": "p", "entity": entity, "bucket": bucket}}
                }
            case "UpsertBucket" if variables.get("summaryMetrics"):
                self.runs[variables["id"]].summary = json.loads(variables["summaryMetrics"])
                return 200, {"data": {"upsertBucket": {"bucket": {"id": variables["id"]}}}}
            case "UpsertBucket":
                name = variables["name"]
                if name in self.deleted:
                    return 409, {
                        "errors": [{"message": f"run {name} was previously created and deleted"}]
                    }
                inserted = name not in self.runs
                run = self.runs.setdefault(name, FakeRun(variables))
                run.variables = run.variables | {
                    k: v for k, v in variables.items() if v is not None
                }
                run.config |= json.loads(variables["config"] or "{}")
                bucket = {
                    "id": "b",
                    "name": name,
                    "displayName": run.variables.get("displayName"),
                    "description": None,
                    "config": json.dumps(run.config),
                    "sweepName": None,
                    "project": {"id": "p", "name": run.variables["project"], "entity": entity},
                    "historyLineCount": len(run.rows),
                }
                return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}}
            case "SweepWithRuns":
                about = {
                    "name": variables["sweep"],
                    "config": json.dumps(self.sweep),
                    "runs": {"edges": []},
                }
                return 200, {
                    "data": {"project": {"sweep": {"id": "s", "state": "RUNNING", **about}}}
                }
            case "CreateAgent":
                return 200, {"data": {"createAgent": {"agent": {"id": "a"}}}}
            case "Heartbeat":
                commands = [] if json.loads(variables["runState"]) else [self.next_point()]
                return 200, {
                    "data": {
                        "agentHeartbeat": {"agent": {"id": "a"}, "commands": json.dumps(commands)}
                    }
                }
            case "Viewer" | "GetDefaultEntity":
                return 200, {
                    "data": {
                        "viewer": {
                            "id": "u",
                            "entity": "someone",
                            "username": "someone",
                            "flags": "{}",
                        }
                    }
                }
            case "Run" if run := self.runs.get(variables["name"]):
                empty = dict.fromkeys(("config", "systemMetrics"), "{}")
                bucket = {
                    "id": variables["name"],
                    "summaryMetrics": json.dumps(run.summary),
                    "name": variables["name"],
                    "tags": [],
                    "historyLineCount": len(run.rows),
                } | empty
                bucket |= {"user": {"name": "someone", "username": "someone"}, "state": "finished"}
                return 200, {"data": {"project": {"internalId": "1", "run": bucket}}}
            case "ArtifactType":
                return 200, {"data": {"project": None}}  # there is none of that name yet
            case "CreateArtifact":
                known = {"id": "S", "latestArtifact": None}
                artifact = {"id": "A", "state": "PENDING", "artifactSequence": known}
                return 200, {"data": {"createArtifact": {"artifact": artifact}}}
            case "CreateArtifactManifest":
                file = {"id": "F", "name": "m", "displayName": "m", **self.place("manifest")}
                manifest = {"artifactManifest": {"id": "M", "file": file}}
                return 200, {"data": {"createArtifactManifest": manifest}}
            case "CreateArtifactFiles":
                nodes = [
                    {
                        "storagePath": f["name"],
                        "uploadMultipartUrls": None,
                        "artifact": {"id": "A"},
                        **self.place(f["name"]),
                    }
                    for f in variables["input"]["artifactFiles"]
                ]
                edges = {"edges": [{"node": node} for node in nodes]}
                return 200, {"data": {"createArtifactFiles": {"files": edges}}}
            case "CommitArtifact":
                return 200, {"data": {"commitArtifact": {"artifact": {"id": "A", "digest": "d"}}}}
            case "UpsertView2":
                self.views.append(variables)
                view = {"id": "V", "name": variables["name"]}
                return 200, {"data": {"upsertView": {"view": view, "inserted": True}}}
            case "RunFiles":
                named_ = variables["fileNames"]
                nodes = [{"id": n, "name": n, "sizeBytes": len(self.files.get(n, b"")),
                          "md5": "m" if n in self.files else "0"} for n in named_]  # fmt: skip
                edges = [{"node": node, "cursor": node["name"]} for node in nodes]
                found = {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}
                run_ = {"fileCount": len(nodes), "files": found}
                return 200, {"data": {"project": {"internalId": "1", "run": run_}}}
            case "CreateRunFiles":
                files = [{"name": name, **self.place(name)} for name in variables["files"]]
                return 200, {
                    "data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
                }
        return 200, {"data": {}}

    def place(self, name: str) -> dict[str, Any]:
        """Where a file is to be put."""
        return {"uploadUrl": f"{self.url}/put/{name}", "uploadHeaders": []}

    def next_point(self) -> dict[str, Any]:
        """What the agent is told to do: a point of the grid, or to go."""
        assert self.sweep is not None
        values = [v["values"] for v in self.sweep["parameters"].values()]
        grid = [
            dict(zip(self.sweep["parameters"], point, strict=True))
            for point in itertools.product(*values)
        ]
        if self.asked == len(grid):
            return {"id": "exit", "type": "exit"}
        self.asked += 1
        args = {key: {"value": value} for key, value in grid[self.asked - 1].items()}
        about = {"id": str(self.asked), "type": "run", "program": self.sweep["program"]}
        return {**about, "run_id": f"agent{self.asked:03d}", "args": args}

    def take_stream(self, run: FakeRun, body: dict[str, Any]) -> None:
        files = body.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            # The offset is the line number: a chunk that is sent again replaces itself.
            run.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
            run.lines_sent += len(history["content"])
        if summary := files.get("wandb-summary.json"):
            run.summary = json.loads(summary["content"][-1])
        run.preempting |= bool(body.get("preempting"))
        if body.get("complete"):
            run.exit_code = body["exitcode"]

    def __enter__(self) -> FakeWandb:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
