"""A stand-in for the Hub: the part of its HTTP interface that models, data and uploads of `huggingface_hub` use.

As a program, `python tests/hub_server.py FOLDER`, it prints its address, and serves FOLDER/models/OWNER/NAME and
FOLDER/datasets/OWNER/NAME, each branch a directory of files. A commit's name is made of its files; a file `gated` in a
repository's folder makes it gated, `private` private to TOKEN. Uploads become directories, too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"
_RESOLVE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit|branch)/([^/]+))?")
_LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")


def commit_of(branch: Path) -> str:
    """40 digits that change with any file."""
    digest = hashlib.sha1()
    for path in files_of(branch):
        digest.update(f"{path.relative_to(branch)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def files_of(branch: Path) -> list[Path]:
    return sorted(path for path in branch.rglob("*") if path.is_file())


class Hub(BaseHTTPRequestHandler):
    """One request."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self.folder = folder
        super().__init__(*arguments)

    def log_message(self, format: str, *args: Any) -> None:
        with (self.folder / "requests.log").open("a") as log:
            log.write(f"{self.command} {self.path}\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _RESOLVE.fullmatch(path):
            return self._file(match[1] or "models", match[2], match[3], match[4])
        if path == "/api/whoami-v2":
            return self._json({"type": "user", "name": "ada", "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        if match := _API.fullmatch(path):
            return self._info(match[1], match[2], match[4] or "main", as_tree=match[3] == "tree")
        return self._error(404, "EntryNotFound", path)

    def _info(self, kind: str, repo: str, revision: str, *, as_tree: bool) -> None:
        branch = self._branch(kind, repo, revision)
        if branch is None:
            return None
        names = [str(path.relative_to(branch)) for path in files_of(branch)]
        if as_tree:
            sizes = {name: (branch / name).stat().st_size for name in names}
            return self._json([{"type": "file", "path": name, "size": sizes[name], "oid": "0" * 40} for name in names])
        siblings = [{"rfilename": name, "size": (branch / name).stat().st_size} for name in names]
        return self._json({"id": repo, "sha": commit_of(branch), "siblings": siblings, "private": False, "gated": False,
                    "disabled": False, "downloads": 0, "likes": 0, "tags": []})  # fmt: skip

    def _branch(self, kind: str, repo: str, revision: str) -> Path | None:
        """The directory of a branch or commit; None where an error was sent."""
        place = self.folder / kind / repo
        knows = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if not place.is_dir() or ((place / "private").exists() and not knows):
            return self._error(404 if knows else 401, "RepoNotFound", repo)
        if (place / "gated").exists() and not knows:
            return self._error(403, "GatedRepo", repo)
        branches = [path for path in sorted(place.iterdir()) if path.is_dir()]
        found = [path for path in branches if revision in (path.name, commit_of(path))]
        return found[0] if found else self._error(404, "RevisionNotFound", revision)

    def _file(self, kind: str, repo: str, revision: str, name: str) -> None:
        branch = self._branch(kind, repo, revision)
        if branch is None:
            return None
        if not (branch / name).is_file():
            return self._error(404, "EntryNotFound", name)
        content = (branch / name).read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit_of(branch))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        return None

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._error(401, "", "who are you?")
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'ada'}/{asked['name']}"
            (self.folder / "models" / repo / "main").mkdir(parents=True, exist_ok=True)
            if asked.get("private") or asked.get("visibility") == "private":
                (self.folder / "models" / repo / "private").touch()
            return self._json({"url": f"http://{self.headers['host']}/{repo}", "name": repo})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if match := _LFS.fullmatch(path):
            address = f"http://{self.headers['host']}/upload"
            objects = [
                {**one, "actions": {"upload": {"href": f"{address}/{one['oid']}", "header": {}}}}
                for one in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        match = _API.fullmatch(path)
        if match and match[3] == "branch":
            (self.folder / match[1] / match[2] / match[4]).mkdir(exist_ok=True)
            return self._json({})
        if match and match[3] == "preupload":
            modes = [
                {"path": one["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular"}
                for one in json.loads(body)["files"]
            ]  # fmt: skip
            return self._json({"files": modes})
        if match and match[3] == "commit":
            return self._commit(self.folder / match[1] / match[2] / match[4], body)
        return self._error(404, "EntryNotFound", path)

    def _commit(self, branch: Path, body: bytes) -> None:
        branch.mkdir(parents=True, exist_ok=True)
        for line in body.splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "file":
                content = base64.b64decode(value["content"])
            elif part["key"] == "lfsFile":
                content = (self.folder / "uploaded" / value["oid"]).read_bytes()
            else:
                continue
            (branch / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            (branch / value["path"]).write_bytes(content)
        commit = commit_of(branch)
        address = f"http://{self.headers['host']}/{branch.parent.parent.name}/{branch.parent.name}/commit/{commit}"
        self._json({"commitUrl": address, "commitOid": commit, "pullRequestUrl": None})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        (self.folder / "uploaded").mkdir(exist_ok=True)
        (self.folder / "uploaded" / self.path.rpartition("/")[2]).write_bytes(content)
        self._json({})

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, Path(sys.argv[1])))  # type: ignore[arg-type]
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
