"""A server that answers the package wandb as Weights & Biases does, as far as a run needs it: create, resume, rewind, log, end.

The answers follow what the package asks for: the state of a run before it is resumed (GraphQL query RunResumeStatus), its creation
(UpsertBucket), its truncation (RewindRun), and lines of its history at an offset (file stream). As the service does, the server
refuses to rewind a run that is running, or every run if it lacks the preview.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

os.environ["WANDB_ERROR_REPORTING"] = "false"  # else the package starts a thread, which every process forked from this one gets too
wandb: Any = importlib.import_module("wandb")


class FakeWandbServer:
    """The server, on a port of this machine. `runs` has the runs by their identifiers.

    Args:
        rewinds: whether the server has the preview of rewinding.
    """

    def __init__(self, *, rewinds: bool = True) -> None:
        self.rewinds, self.runs = rewinds, {}  # type: ignore[var-annotated]
        self.deleted: set[str] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, content: object) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
                if self.path.endswith("/graphql"):
                    body = json.loads(data)
                    self.answer(server.query(body["query"], body.get("variables") or {}))
                elif "file_stream" in self.path:
                    server.stream(self.path.split("/")[-2], json.loads(data))
                    self.answer({"exitcode": None, "limits": {}})
                else:  # telemetry
                    self.answer({})

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def points(self, run_id: str, name: str) -> list[tuple[int, Any]]:
        """(step, value) of a metric, in the order of the history."""
        return [(row["_step"], row[name]) for row in self.runs[run_id]["history"] if name in row]

    def query(self, text: str, values: dict[str, Any]) -> dict[str, Any]:
        if "mutation RewindRun" in text:
            run = self.runs[values["runName"]]
            problem = "rewind is not enabled" if not self.rewinds else None
            problem = "cannot rewind a run that is not in a terminal state" if run["state"] == "running" else problem
            if problem is not None:
                return {"data": {"rewindRun": None}, "errors": [{"message": problem}]}
            run["history"] = [row for row in run["history"] if row["_step"] <= values["metricValue"]]
            return {"data": {"rewindRun": {"rewoundRun": self._bucket(values["runName"])}}}
        if "mutation UpsertBucket" in text:
            name = values["name"]
            if name in self.deleted:
                return {"data": {"upsertBucket": None}, "errors": [{"message": f"run {name} was previously created and deleted"}]}
            is_new = name not in self.runs
            run = self.runs.setdefault(name, {"history": [], "config": {}, "starts": 0, "preempting": False})
            run["starts"] += values.get("program") is not None  # further calls change the run
            run |= {"state": "running", "display_name": values.get("displayName") or run.get("display_name")}
            run["config"] = json.loads(values["config"]) if values.get("config") else run["config"]
            return {"data": {"upsertBucket": {"bucket": self._bucket(name), "inserted": is_new}}}
        if "RunResumeStatus" in text:
            known = self.runs.get(values["name"])
            return {"data": {"model": {"name": "p", "entity": {"name": "me"}, "bucket": known and self._tail(values["name"])}}}
        if "iewer" in text:
            user = {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"data": {"viewer": user, "serverInfo": {"cliVersionInfo": None, "latestLocalVersionInfo": None}}}
        if "ServerFeatures" in text:
            return {"data": {"serverInfo": {"features": []}}}
        return {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}}

    def stream(self, run_id: str, body: dict[str, Any]) -> None:
        run = self.runs[run_id]
        lines = (body.get("files") or {}).get("wandb-history.jsonl")
        if lines:
            run["history"][lines["offset"] :] = [json.loads(line) for line in lines["content"]]
        run["preempting"] |= bool(body.get("preempting"))
        if body.get("complete"):
            run["state"] = "failed" if body.get("exitcode") else "finished"

    def _bucket(self, name: str) -> dict[str, Any]:
        run = self.runs[name]
        project = {"id": "P", "name": "p", "entity": {"id": "E", "name": "me"}}
        shown = {"displayName": run["display_name"] or name, "description": None, "sweepName": None, "project": project}
        return {"id": f"id{name}", "name": name, "config": "{}", "historyLineCount": len(run["history"]), **shown}

    def _tail(self, name: str) -> dict[str, Any]:
        counts = dict.fromkeys(("logLineCount", "eventsLineCount"), 0)
        tails = {"historyTail": json.dumps([json.dumps(row) for row in self.runs[name]["history"][-1:]]), "eventsTail": "[]"}
        texts = {"summaryMetrics": "{}", "wandbConfig": json.dumps({"t": 1}), "tags": []}
        return {**self._bucket(name), **counts, **tails, **texts}
