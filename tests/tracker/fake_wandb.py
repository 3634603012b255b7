"""A server that speaks as much of wandb's protocol as runs need, and misbehaves on request."""

import gzip
import http.server
import itertools
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import unquote

Behaviour = Literal[
    "ok",
    "rate limited",  # 429 to everything
    "rate limited at first",  # 429 to the first rows
    "hangs",
    "hangs after start",
    "hangs at rows",  # lists runs, and has no row of them
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
    state: str = "finished"
    heartbeat: str = "2030-01-01T00:00:00Z"


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
        self.pages = 0  # of listed runs
        self.requests = 0
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
        named = re.search(r"\b(?:query|mutation) (\w+)", request["query"])
        variables = request.get("variables") or {}
        return 200, {"data": self.data(named[1], variables) if named else {}}

    def data(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What an operation of GraphQL answers."""
        entity = {"id": "e", "name": "someone"}
        run = self.runs.get(variables.get("name", ""))
        match operation:
            case "RunResumeStatus":
                bucket = run and {
                    "id": "b", "name": variables["name"], "logLineCount": 0,
                    "summaryMetrics": json.dumps(run.summary), "eventsLineCount": 0,
                    "displayName": run.variables["displayName"], "eventsTail": "[]",
                    "historyLineCount": len(run.rows), "config": json.dumps(run.config),
                    "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
                    "tags": run.variables.get("tags") or [], "notes": run.variables.get("notes"),
                    "wandbConfig": json.dumps({"t": {}}),
                }  # fmt: skip
                return {"model": {"id": "p", "name": "p", "entity": entity, "bucket": bucket}}
            case "UpsertBucket" if variables.get("summaryMetrics"):
                self.runs[variables["id"]].summary = json.loads(variables["summaryMetrics"])
                return {"upsertBucket": {"bucket": {"id": variables["id"]}}}
            case "UpsertBucket":
                name = variables["name"]
                inserted = name not in self.runs
                run = self.runs.setdefault(name, FakeRun(variables))
                run.variables |= {k: v for k, v in variables.items() if v is not None}
                run.config |= json.loads(variables["config"] or "{}")
                project = {"id": "p", "name": run.variables["project"], "entity": entity}
                shown = {"displayName": run.variables.get("displayName"), "description": None}
                bucket = {"id": "b", "name": name, "config": json.dumps(run.config), **shown}
                bucket |= {"sweepName": None, "project": project}
                bucket["historyLineCount"] = len(run.rows)
                return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
            case "SweepWithRuns":
                about = {"id": "s", "state": "RUNNING", "name": variables["sweep"]}
                more = {"config": json.dumps(self.sweep), "runs": {"edges": []}}
                return {"project": {"sweep": about | more}}
            case "CreateAgent":
                return {"createAgent": {"agent": {"id": "a"}}}
            case "Heartbeat":
                commands = [] if json.loads(variables["runState"]) else [self.next_point()]
                beat = {"agent": {"id": "a"}, "commands": json.dumps(commands)}
                return {"agentHeartbeat": beat}
            case "Viewer" | "GetDefaultEntity":
                who = {"id": "u", "entity": "someone", "username": "someone", "flags": "{}"}
                return {"viewer": who}
            case "Runs":
                return self.listed(variables)
            case "RunHistoryKeys" if run:
                steps = [row["_step"] for row in run.rows]
                known = {"lastStep": max(steps, default=-1), "keys": {}}
                return {"project": {"run": {"historyKeys": known}}}
            case "RunParquetHistory" if run := self.runs.get(variables["runName"]):
                found = {"parquetUrls": [], "liveData": []}
                return {"project": {"run": {"parquetHistory": found}}}
            case "SampledHistoryPage" | "HistoryPage" if self.behaviour == "hangs at rows":
                self._closed.wait()
            case "SampledHistoryPage" if run := self.runs.get(variables["run"]):
                spec = json.loads(variables["spec"])
                low, high, keys = spec["minStep"], spec["maxStep"], spec["keys"]
                rows = [row for row in run.rows if low <= row["_step"] <= high]
                rows = [{k: row[k] for k in keys} for row in rows if {*keys} <= row.keys()]
                return {"project": {"run": {"sampledHistory": [rows]}}}
            case "HistoryPage" if run := self.runs.get(variables["run"]):
                low, high = variables["minStep"], variables["maxStep"]
                rows = [json.dumps(row) for row in run.rows if low <= row["_step"] < high]
                return {"project": {"run": {"history": rows}}}
            case "Run" if run:
                who = {"name": "someone", "username": "someone"}
                bucket = {"id": variables["name"], "name": variables["name"], "tags": []}
                bucket |= dict.fromkeys(("config", "systemMetrics"), "{}")
                bucket |= {"user": who, "state": "finished", "historyLineCount": len(run.rows)}
                bucket["summaryMetrics"] = json.dumps(run.summary)
                return {"project": {"internalId": "1", "run": bucket}}
            case "ArtifactType":
                return {"project": None}  # there is none of that name yet
            case "CreateArtifact":
                known = {"id": "S", "latestArtifact": None}
                artifact = {"id": "A", "state": "PENDING", "artifactSequence": known}
                return {"createArtifact": {"artifact": artifact}}
            case "CreateArtifactManifest":
                file = {"id": "F", "name": "m", "displayName": "m", **self.place("manifest")}
                return {"createArtifactManifest": {"artifactManifest": {"id": "M", "file": file}}}
            case "CreateArtifactFiles":
                names = [f["name"] for f in variables["input"]["artifactFiles"]]
                about = {"uploadMultipartUrls": None, "artifact": {"id": "A"}}
                nodes = [{"storagePath": n, **about, **self.place(n)} for n in names]
                edges = {"edges": [{"node": node} for node in nodes]}
                return {"createArtifactFiles": {"files": edges}}
            case "CommitArtifact":
                return {"commitArtifact": {"artifact": {"id": "A", "digest": "d"}}}
            case "UpsertView2":
                self.views.append(variables)
                view = {"id": "V", "name": variables["name"]}
                return {"upsertView": {"view": view, "inserted": True}}
            case "RunFiles":
                nodes = [
                    {"id": n, "name": n, "sizeBytes": len(self.files.get(n, b""))}
                    | {"md5": "m" if n in self.files else "0"}
                    for n in variables["fileNames"]
                ]
                edges = [{"node": node, "cursor": node["name"]} for node in nodes]
                found = {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}
                files = {"fileCount": len(nodes), "files": found}
                return {"project": {"internalId": "1", "run": files}}
            case "CreateRunFiles":
                files = [{"name": name, **self.place(name)} for name in variables["files"]]
                made = {"runID": "b", "uploadHeaders": [], "files": files}
                return {"createRunFiles": made}
        return {}

    def listed(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A page of the runs of a project, of those with the values that are asked for."""
        wanted, begin = json.loads(variables["filters"]), int(variables["cursor"] or 0)
        self.pages += 1

        def has(run: FakeRun) -> dict[str, Any]:
            known = {f"config.{key}": one["value"] for key, one in run.config.items()}
            return known | {"group": run.variables.get("groupName"), "state": run.state}

        runs = [r for r in self.runs.items() if wanted.items() <= has(r[1]).items()]
        end, edges = begin + variables["perPage"], list[dict[str, Any]]()
        for i, (name, run) in enumerate(runs[begin:end], begin + 1):
            about = {"id": name, "name": name, "tags": [], "systemMetrics": "{}"}
            about |= {"displayName": run.variables.get("displayName"), "user": {"name": "someone"}}
            about |= {"jobType": run.variables.get("jobType"), "projectId": "1"}
            about |= {"config": json.dumps(run.config), "summaryMetrics": json.dumps(run.summary)}
            about |= {"state": run.state, "historyLineCount": len(run.rows)}
            edges.append({"cursor": str(i), "node": about | {"heartbeatAt": run.heartbeat}})
        page = {"endCursor": str(end), "hasNextPage": end < len(runs)}
        found = {"edges": edges, "pageInfo": page, "totalCount": len(runs)}
        return {
            "project": {"internalId": "1", "runCount": len(runs), "readOnly": False, "runs": found}
        }

    def place(self, name: str) -> dict[str, Any]:
        """Where a file is to be put."""
        return {"uploadUrl": f"{self.url}/put/{name}", "uploadHeaders": []}

    def next_point(self) -> dict[str, Any]:
        """What the agent is told to do: a point of the grid, or to go."""
        assert self.sweep is not None
        values = [v["values"] for v in self.sweep["parameters"].values()]
        keys = self.sweep["parameters"]
        grid = [dict(zip(keys, point, strict=True)) for point in itertools.product(*values)]
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

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
