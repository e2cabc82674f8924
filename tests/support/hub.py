"""A hub on this machine: it takes commits and keeps their files in memory."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml


class FakeHub:
    """Repositories, branches and files that were sent."""

    def __init__(self):
        self.repositories, self.branches, self.commits = {}, [], []

    def create(self, body, *_):
        name = body["name"] if "/" in body["name"] else f"me/{body['name']}"
        self.repositories.setdefault(name, {"asked": body, "files": {}})
        return {"url": f"https://huggingface.co/{name}", "id": "1", "name": name}

    def validate(self, body):
        head = yaml.safe_load(body["content"].split("---\n")[1])
        return {
            "errors": [] if isinstance(head, dict) else [{"message": "no header"}],
            "warnings": [],
        }

    def branch(self, body, name, branch):
        self.branches.append((name, branch))
        return {}

    def preupload(self, body, *_):
        kept = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            for file in body["files"]
        ]
        return {"files": kept}

    def commit(self, lines, name, revision):
        for line in lines:
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.repositories[name]["files"][line["value"]["path"]] = content
            elif line["key"] == "header":
                self.commits.append((name, revision, line["value"]["summary"]))
        return {"commitUrl": f"https://huggingface.co/{name}/commit/1", "commitOid": "1"}


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            path = self.path.partition("?")[0].strip("/").split("/")
            if path[1:] == ["repos", "create"]:
                made = hub.create(json.loads(sent))
            elif path[1:] == ["validate-yaml"]:
                made = hub.validate(json.loads(sent))
            elif (
                path[1] == "models"
                and len(path) > 5
                and path[4] in ("preupload", "commit", "branch")
            ):
                name, what, revision = "/".join(path[2:4]), path[4], "/".join(path[5:])
                lines = [json.loads(line) for line in sent.splitlines() if line]
                made = getattr(hub, what)(
                    lines if what == "commit" else (lines or [{}])[0], name, revision
                )
            else:
                self.send_response(404, f"the fake hub has no {self.command} {self.path}")
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = json.dumps(made).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET = do_HEAD = _answer

        def log_message(self, *_):
            pass

    return Handler


@contextmanager
def fake_hub(monkeypatch):
    """A `FakeHub` that huggingface_hub talks to for a while."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    with monkeypatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", endpoint)
        # transformers' own client, which keeps the endpoint of its first call
        patched.setattr("transformers.utils.hub._hf_api", None)
        # made of the endpoint when it is imported
        files = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patched.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        patched.setattr(constants, "HF_HUB_OFFLINE", False)
        patched.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name in (
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "ALL_PROXY",
            "http_proxy",
            "https_proxy",
            "all_proxy",
        ):
            patched.delenv(name, raising=False)
        close_session()  # one that was begun before keeps its proxies
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
