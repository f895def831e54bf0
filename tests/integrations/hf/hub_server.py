"""A stand-in for the Hugging Face Hub on 127.0.0.1: repositories with branches and commits, private ones, large files.

It has the requests that `snapshot_download`, `create_repo`, `create_branch` and `upload_folder` make, and answers them as
the Hub does, errors and their headers included. What it lacks is answered with 501, so a request of a newer client is seen.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_owner"


@dataclass
class Repository:
    private: bool
    # commit -> path -> content; branch -> commit
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr((len(self.commits), branch, sorted(files))).encode()).hexdigest()
        before = self.commits.get(self.branches.get(branch, ""), {})
        self.commits[sha] = {**before, **files}
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


@dataclass
class Hub:
    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        repository = self.repositories[repo_id]
        return repository.commits[repository.branches[branch]]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.dispatch()

    def do_GET(self) -> None:
        self.dispatch()

    def do_POST(self) -> None:
        self.dispatch()

    def do_PUT(self) -> None:
        self.dispatch()

    def dispatch(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._chunks()
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {path}")
        verb = "GET" if self.command == "HEAD" else self.command
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if method == verb and match:
                answer(self, **match.groupdict())
                return
        self.state.unknown.append(f"{self.command} {path}")
        self.reply(501, {"error": f"the stand-in has no {self.command} {path}"})

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def reply(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply(status, {"error": message}, headers)

    @property
    def is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repository(self, repo_id: str) -> Repository | None:
        """As the Hub: a private repository and a missing one are the same to a stranger, 401; to the owner it is 404."""
        found = self.state.repositories.get(repo_id)
        if found is not None and (self.is_owner or not found.private):
            return found
        self.refuse(404 if self.is_owner else 401, "RepoNotFound", "Repository not found")
        return None

    def commit_of(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.repository(repo_id)
        if repository is None:
            return None
        sha = repository.resolve(revision)
        if sha is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return sha, repository.commits[sha]


def info(handler: _Handler, repo_id: str, revision: str = "main") -> None:
    found = handler.commit_of(repo_id, revision)
    if found is not None:
        files = [{"rfilename": path} for path in found[1]]
        private = handler.state.repositories[repo_id].private
        handler.reply(200, {"id": repo_id, "sha": found[0], "private": private, "tags": [], "siblings": files})


def tree(handler: _Handler, repo_id: str, revision: str) -> None:
    found = handler.commit_of(repo_id, revision)
    if found is not None:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in found[1].items()
        ]
        handler.reply(200, entries)


def resolve(handler: _Handler, repo_id: str, revision: str, path: str) -> None:
    found = handler.commit_of(repo_id, revision)
    if found is None:
        return
    sha, files = found
    if path not in files:
        handler.refuse(404, "EntryNotFound", "Entry not found")
        return
    tag = hashlib.sha1(files[path]).hexdigest()
    handler.reply(200, files[path], {"X-Repo-Commit": sha, "ETag": f'"{tag}"'})


def create(handler: _Handler) -> None:
    if not handler.is_owner:
        handler.refuse(401, "", "Invalid username or password.")
        return
    wanted = json.loads(handler.body)
    repo_id = f"{wanted.get('organization') or 'owner'}/{wanted['name']}"
    if repo_id in handler.state.repositories:
        handler.reply(409, {"error": "exists", "url": f"{handler.state.endpoint}/{repo_id}"})
        return
    repository = Repository(private=bool(wanted.get("private")) or wanted.get("visibility") == "private")
    repository.commit("main", {})
    handler.state.repositories[repo_id] = repository
    handler.reply(200, {"url": f"{handler.state.endpoint}/{repo_id}"})


def branch(handler: _Handler, repo_id: str, name: str) -> None:
    repository = handler.repository(repo_id)
    if repository is None:
        return
    if name in repository.branches:
        handler.refuse(409, "", "Reference already exists")
        return
    repository.branches[name] = repository.branches["main"]
    handler.reply(200, {})


def validate(handler: _Handler) -> None:
    handler.reply(200, {"errors": [], "warnings": []})


def preupload(handler: _Handler, repo_id: str, revision: str) -> None:
    if handler.commit_of(repo_id, revision) is not None:
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for f in json.loads(handler.body)["files"]
        ]
        handler.reply(200, {"files": files})


def batch(handler: _Handler, repo_id: str) -> None:
    if handler.repository(repo_id) is not None:
        upload = f"{handler.state.endpoint}/large/"
        objects = [
            {**thing, "actions": {"upload": {"href": upload + thing["oid"]}}}
            for thing in json.loads(handler.body)["objects"]
        ]
        handler.reply(200, {"transfer": "basic", "objects": objects})


def put(handler: _Handler, oid: str) -> None:
    assert hashlib.sha256(handler.body).hexdigest() == oid
    handler.state.large[oid] = handler.body
    handler.reply(200, {})


def commit(handler: _Handler, repo_id: str, revision: str) -> None:
    if handler.commit_of(repo_id, revision) is None:
        return
    if not handler.is_owner:
        handler.refuse(403, "", "You do not have write access")
        return
    files = {}
    for line in handler.body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            assert value["encoding"] == "base64"
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = handler.state.large[value["oid"]]
    sha = handler.state.repositories[repo_id].commit(revision, files)
    handler.reply(200, {"commitOid": sha, "commitUrl": f"{handler.state.endpoint}/{repo_id}/commit/{sha}"})


REPO = r"(?P<repo_id>[^/]+/[^/]+)"
ROUTES = [
    ("POST", r"/api/repos/create", create),
    ("POST", r"/api/validate-yaml", validate),
    ("GET", rf"/api/models/{REPO}", info),
    ("GET", rf"/api/models/{REPO}/revision/(?P<revision>.+)", info),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)", tree),
    ("POST", rf"/api/models/{REPO}/branch/(?P<name>.+)", branch),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>.+)", preupload),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>.+)", commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", batch),
    ("PUT", r"/large/(?P<oid>\w+)", put),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
]
