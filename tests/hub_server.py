"""A Hugging Face Hub of one's own: the HTTP endpoints that `huggingface_hub` uses, over a socket.

Create a repository or branch, preupload, the Git LFS batch API with single and multi-part uploads
and verification, commit, model info, tree, and downloads with ETag and X-Repo-Commit (large files
through a redirect to another host, as on the Hub). Everything is kept in memory and checked: an
object whose bytes do not have the promised SHA-256 or size is refused, and so is a commit that
names an object nobody sent. Every request is kept in `log`; `faults` make the next matching
requests fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_aTokenThatMustNotBeSeenAnywhere0123"
SINGLE_PART = 100_000  # bytes; larger objects are sent in parts of this size
LFS_ENDINGS = (".safetensors", ".bin", ".gguf")


@dataclass
class Blob:
    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def pointer(self) -> bytes:
        """What Git holds in the place of a large file."""
        version = "version https://git-lfs.github.com/spec/v1"
        return f"{version}\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()

    @property
    def oid(self) -> str:
        """Git's own hash, of the pointer for a large file."""
        body = self.pointer if self.lfs else self.data
        return hashlib.sha1(f"blob {len(body)}\0".encode() + body).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, title: str, files: dict[str, Blob]) -> str:
        self.titles.append(title)
        listing = "".join(f"{name} {blob.oid}\n" for name, blob in sorted(files.items()))
        oid = hashlib.sha1(f"{len(self.titles)} {title}\n{listing}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        return oid

    def files(self, revision: str = "main") -> dict[str, Blob]:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class Fault:
    """Fail requests of `method` whose path contains `part`: the `after`-th and `times` - 1 more.

    status: answered instead of the answer; null: the connection is cut in the middle of the body.
    """

    method: str
    part: str
    status: int | None
    after: int = 1
    times: int = 1

    def strikes(self, method: str, path: str) -> bool:
        if method != self.method or self.part not in path:
            return False
        self.after -= 1
        if self.after > 0 or self.times == 0:
            return False
        self.times -= 1
        return True


class Refused(Exception):
    """An answer that is an error: status, message, the Hub's X-Error-Code, more of the body."""

    def __init__(self, status: int, message: str, code: str = "", **more: Any) -> None:
        self.status, self.message, self.code, self.more = status, message, code, more


class FakeHub:
    """State and rules; the HTTP part is `_Handler`. owner: whose token TOKEN is."""

    def __init__(self, owner: str = "me") -> None:
        self.owner = owner
        self.endpoint = self.storage = ""
        self.lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the address."""
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.log: list[tuple[str, str]] = []
        self.agents: set[str] = set()
        self.faults: list[Fault] = []
        self.ignored: set[str] = set()  # names that a .gitignore keeps out
        self.flip_a_bit = False  # in every object that arrives: a bad cable

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path in self.log)

    def repo(self, name: str) -> Repo:
        if name not in self.repos:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.repos[name]

    def files(self, repo: str, revision: str) -> dict[str, Blob]:
        found = self.repo(repo)
        if revision not in found.branches and revision not in found.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found.files(revision)

    # --------------------------------------------------------------------------------- /api

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        owner = body.get("organization") or self.owner
        name = f"{owner}/{body['name']}"
        if owner != self.owner:
            raise Refused(403, f"You don't have the rights to create a model under {owner}")
        if name in self.repos:
            url = f"{self.endpoint}/{name}"
            raise Refused(409, "You already created this model repo", url=url)
        self.repos[name] = Repo(private=body.get("visibility") == "private")
        self.repos[name].commit("main", "initial commit", {".gitattributes": Blob(b"", False)})
        return {"url": f"{self.endpoint}/{name}", "name": name}

    def branch(self, repo: str, name: str) -> dict[str, Any]:
        found = self.repo(repo)
        if name in found.branches:
            raise Refused(409, f"Reference already exists: {name}")
        found.branches[name] = found.branches["main"]
        return {}

    def info(self, repo: str, revision: str) -> dict[str, Any]:
        files, found = self.files(repo, revision), self.repo(repo)
        card = {}
        if "README.md" in files:
            card = front_matter(files["README.md"].data.decode())
        return {
            "_id": "0",
            "id": repo,
            "sha": found.branches.get(revision, revision),
            "private": found.private,
            "tags": [],
            "cardData": card,
            "siblings": [{"rfilename": name} for name in files],
        }

    def tree(self, repo: str, revision: str) -> list[dict[str, Any]]:
        rows = []
        for name, blob in sorted(self.files(repo, revision).items()):
            row = {"type": "file", "path": name, "size": len(blob.data), "oid": blob.oid}
            if blob.lfs:
                lfs = {"oid": blob.sha256, "size": len(blob.data)}
                row["lfs"] = lfs | {"pointerSize": len(blob.pointer)}
            rows.append(row)
        return rows

    def validate_yaml(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            front = front_matter(body["content"])
        except yaml.YAMLError as error:
            raise Refused(400, f"YAML: {error}") from error
        if front.get("base_model_relation", "adapter") not in ("adapter", "finetune", "quantized"):
            raise Refused(400, '"base_model_relation" is none that the Hub knows')
        return {"errors": [], "warnings": []}

    def preupload(self, repo: str, revision: str, body: dict[str, Any]) -> dict[str, Any]:
        there, rows = self.files(repo, revision), []
        for file in body["files"]:
            assert len(base64.b64decode(file["sample"])) == min(file["size"], 512)
            lfs = file["path"].endswith(LFS_ENDINGS)
            row = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular"}
            row["shouldIgnore"] = file["path"] in self.ignored
            if (blob := there.get(file["path"])) is not None:
                row["oid"] = blob.sha256 if blob.lfs else blob.oid
            rows.append(row)
        return {"files": rows}

    def commit(self, repo: str, revision: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        header, *operations = lines
        assert header["key"] == "header", header
        files = dict(self.files(repo, revision))
        for operation in operations:
            value = operation["value"]
            match operation["key"]:
                case "file":
                    assert value["encoding"] == "base64"
                    files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
                case "lfsFile":
                    data = self.objects.get(value["oid"])
                    if data is None or len(data) != value["size"]:
                        raise Refused(400, f"LFS object {value['oid']} was not uploaded")
                    files[value["path"]] = Blob(data, True)
                case "deletedFile":
                    if files.pop(value["path"], None) is None:
                        raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
                case other:
                    raise Refused(400, f"unknown operation {other}")
        oid = self.repo(repo).commit(revision, header["value"]["summary"], files)
        url = f"{self.endpoint}/{repo}/commit/{oid}"
        return {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""}

    # ------------------------------------------------------------------------------ Git LFS

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["operation"] == "upload" and body["hash_algo"] == "sha256", body
        return {"transfer": "basic", "objects": [self._actions(row) for row in body["objects"]]}

    def _actions(self, row: dict[str, Any]) -> dict[str, Any]:
        oid, size = row["oid"], row["size"]
        if oid in self.objects:
            return {"oid": oid, "size": size}  # no actions: it is here already
        upload: dict[str, Any] = {"href": f"{self.storage}/lfs/{oid}"}
        if size > SINGLE_PART:
            n = -(-size // SINGLE_PART)
            parts = {f"{i:05d}": f"{self.storage}/lfs/{oid}/{i}" for i in range(1, n + 1)}
            upload["header"] = {"chunk_size": str(SINGLE_PART), **parts}
            upload["href"] = f"{self.endpoint}/complete/{oid}"
        verify = {"href": f"{self.endpoint}/verify/{oid}"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def store(self, oid: str, data: bytes) -> None:
        if self.flip_a_bit:
            data = bytes([data[0] ^ 1]) + data[1:]
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refused(400, f"the bytes received do not have the SHA-256 {oid}")
        self.objects[oid] = data

    def store_part(self, oid: str, number: int, data: bytes) -> str:
        self.parts.setdefault(oid, {})[number] = data
        return hashlib.md5(data).hexdigest()

    def complete(self, oid: str, body: dict[str, Any]) -> dict[str, Any]:
        parts = self.parts.get(oid, {})
        named = {row["partNumber"]: row["etag"] for row in body["parts"]}
        assert body["oid"] == oid
        if named != {i: hashlib.md5(data).hexdigest() for i, data in parts.items()}:
            raise Refused(400, "the parts named are not the parts received")
        self.store(oid, b"".join(parts[i] for i in sorted(parts)))
        return {}

    def verify(self, oid: str, body: dict[str, Any]) -> dict[str, Any]:
        if len(self.objects.get(oid, b"")) != body["size"] or body["oid"] != oid:
            raise Refused(404, f"object {oid} is not here, or not whole")
        return {}


def front_matter(text: str) -> dict[str, Any]:
    if not text.startswith("---\n"):
        return {}
    return yaml.safe_load(text[4:].partition("\n---")[0]) or {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: `FakeHub.log` has it."""

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def _serve(self, method: str) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        with hub.lock:
            hub.log.append((method, path))
            hub.agents.add(self.headers.get("User-Agent", ""))
            fault = next((f for f in hub.faults if f.strikes(method, path)), None)
        if fault is not None and fault.status is None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self._body()
        try:
            if fault is not None:
                raise Refused(fault.status or 500, "a fault the test asked for")
            with hub.lock:
                self._route(method, path, body)
        except Refused as error:
            headers = {"X-Error-Message": error.message}
            if error.code:
                headers["X-Error-Code"] = error.code
            self._json({"error": error.message, **error.more}, error.status, headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _route(self, method: str, path: str, body: bytes) -> None:
        hub, parts = self.hub, [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] in ("lfs", "cdn", "complete"):  # signed addresses, no login
            assert "Authorization" not in self.headers, "the token left the Hub"
            return self._storage(method, parts, body)
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            raise Refused(401, "Invalid credentials in Authorization header")
        logged_in = "Authorization" in self.headers
        if method in ("POST", "PUT") and not logged_in:
            raise Refused(401, "Invalid username or password.")
        if "resolve" in parts and method in ("GET", "HEAD"):
            self._visible("/".join(parts[:2]), logged_in)
            return self._resolve(method, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        if parts[:2] == ["api", "models"]:
            self._visible("/".join(parts[2:4]), logged_in)
        match method, parts:
            case "POST", ["api", "repos", "create"]:
                answer: Any = hub.create(json.loads(body))
            case "POST", ["api", "validate-yaml"]:
                answer = hub.validate_yaml(json.loads(body))
            case "GET", ["api", "models", owner, name]:
                answer = hub.info(f"{owner}/{name}", "main")
            case "GET", ["api", "models", owner, name, "revision", revision]:
                answer = hub.info(f"{owner}/{name}", revision)
            case "GET", ["api", "models", owner, name, "tree", revision]:
                assert parse_qs(urlsplit(self.path).query)["recursive"] == ["true"]
                answer = hub.tree(f"{owner}/{name}", revision)
            case "POST", ["api", "models", owner, name, "branch", branch]:
                answer = hub.branch(f"{owner}/{name}", branch)
            case "POST", ["api", "models", owner, name, "preupload", revision]:
                self._own(owner)
                answer = hub.preupload(f"{owner}/{name}", revision, json.loads(body))
            case "POST", ["api", "models", owner, name, "commit", revision]:
                self._own(owner)
                lines = [json.loads(line) for line in body.splitlines()]
                answer = hub.commit(f"{owner}/{name}", revision, lines)
            case "POST", [owner, _, "info", "lfs", "objects", "batch"]:
                self._own(owner)
                answer = hub.batch(json.loads(body))
            case "POST", ["verify", oid]:
                answer = hub.verify(oid, json.loads(body))
            case _:
                raise Refused(404, f"no such endpoint: {method} {path}")
        return self._json(answer)

    def _own(self, owner: str) -> None:
        if owner != self.hub.owner:
            raise Refused(403, "you have no right to write here")

    def _visible(self, repo: str, logged_in: bool) -> None:
        if self.hub.repo(repo).private and not logged_in:
            raise Refused(401, "Invalid username or password.", "RepoNotFound")

    def _storage(self, method: str, parts: list[str], body: bytes) -> None:
        hub = self.hub
        match method, parts:
            case "PUT", ["lfs", oid]:
                hub.store(oid, body)
                self._send(200, b"", {})
            case "PUT", ["lfs", oid, number]:
                self._send(200, b"", {"ETag": hub.store_part(oid, int(number), body)})
            case "POST", ["complete", oid]:
                self._json(hub.complete(oid, json.loads(body)))
            case "GET", ["cdn", oid]:
                self._send(200, hub.objects[oid], {"ETag": f'"{oid}"'})
            case _:
                raise Refused(404, f"no such object: {'/'.join(parts)}")

    def _resolve(self, method: str, repo: str, revision: str, name: str) -> None:
        files = self.hub.files(repo, revision)
        if name not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        blob = files[name]
        headers = {"X-Repo-Commit": self.hub.repo(repo).branches.get(revision, revision)}
        if blob.lfs:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
            headers["Location"] = f"{self.hub.storage}/cdn/{blob.sha256}"
            return self._send(302, b"", headers)
        return self._send(200, blob.data, headers | {"ETag": f'"{blob.oid}"'}, method == "HEAD")

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        more = {"Content-Type": "application/json", **(headers or {})}
        self._send(status, json.dumps(value).encode(), more)

    def _send(self, status: int, body: bytes, headers: dict[str, str], head: bool = False) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not head and self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(hub: FakeHub | None = None) -> Iterator[FakeHub]:
    """A FakeHub listening on a free port: `hub.endpoint` is what HF_ENDPOINT should be."""
    hub = hub or FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    port = server.server_address[1]
    # Two names of one machine: what large files are sent to is another host, as on the Hub.
    hub.endpoint, hub.storage = f"http://localhost:{port}", f"http://127.0.0.1:{port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
