"""A Hugging Face hub on 127.0.0.1 that serves datasets and models, FOLDER/OWNER/NAME.

A folder FOLDER/OWNER/NAME@REVISION is another branch of the same repository.

It answers what `huggingface_hub` and `datasets` ask of the real one: the revision and the files of
a repository, and the files themselves, whole or by ranges.
"""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from pathlib import Path


class FakeHub:
    """Serves until it is closed.

    Attributes:
      requests: (method, path, range or "", bytes sent) of each request, in order.
      failures: paths of files that answer the given status, by the end of their name.
      codes: value of X-Error-Code of those answers, by status.
      lfs: facts of large files, as {"sha256": hex}, by their name.
      cut: numbers of bytes after which the connection breaks, by the end of a file's name.
    """

    def __init__(self, folder: Path):
        self.folder, self.requests, self.failures = folder, [], {}
        self.codes: dict[int, str] = {}
        self.cut: dict[str, int] = {}
        self.lfs: dict[str, dict] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def bytes_of(self, ending: str) -> int:
        """Returns how many bytes of the files with this end of their name were sent."""
        return sum(count for _, path, _, count in self.requests if path.endswith(ending))

    @contextlib.contextmanager
    def used_here(self, monkeypatch, cache: Path):
        """Inside, the libraries of this process, which read HF_ENDPOINT when they were imported,
        take this hub for the real one."""
        import datasets
        import huggingface_hub

        constants = huggingface_hub.constants
        template = f"{self.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setenv("HF_ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", self.endpoint)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield
        huggingface_hub.HfFileSystem.clear_instance_cache()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def revision(self, dataset: str) -> str:
        """Returns a digest of the names and contents of the files, as a commit of the real hub."""
        digest = hashlib.sha1()
        for path in self.files(dataset):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def sizes(self, name: str) -> dict[str, int]:
        """Returns the bytes of each file of a repository."""
        files = self.files(name)
        root = self.folder / name
        return {path.relative_to(root).as_posix(): path.stat().st_size for path in files}

    def root(self, name: str, revision: str) -> str:
        """Returns the folder OWNER/NAME or OWNER/NAME@BRANCH of a branch or commit; "" for none."""
        for folder in sorted(self.folder.glob(f"{name}*")):
            place = folder.relative_to(self.folder).as_posix()
            end = place.removeprefix(name)
            branch = end[1:] or "main"
            if end[:1] not in ("", "@"):
                continue
            if folder.is_dir() and revision in (branch, self.revision(place)):
                return place
        return ""

    def files(self, dataset: str) -> list[Path]:
        return sorted(path for path in (self.folder / dataset).rglob("*") if path.is_file())


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer()

    def do_HEAD(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._file(path, *match.groups())
            match = re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)(/.*)?", path)
            if not match or not (self.hub.folder / match[1]).is_dir():
                return self._send(path, 404, b"", {"X-Error-Code": "RepoNotFound"})
            dataset, rest = match[1], match[2] or ""
            asked = re.match(r"/(?:revision|tree|paths-info)/([^/]+)", rest)
            dataset = self.hub.root(dataset, asked[1] if asked else "main")
            if not dataset:
                return self._send(path, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            if status := self.hub.failures.get("api"):
                return self._failure(path, status)
            if rest.startswith("/tree/"):
                return self._json(path, self._tree(dataset, rest, url.query))
            if rest.startswith("/paths-info/"):
                form = urllib.parse.parse_qs(body)
                asked = form["paths"] if form else json.loads(body)["paths"]
                rows = self._rows(dataset)
                return self._json(path, [row for row in rows if row["path"] in asked])
            sizes = self.hub.sizes(dataset)
            siblings = [
                {"rfilename": path, "size": size}
                | (
                    {"lfs": self.hub.lfs[path] | {"size": size, "pointerSize": 1}}
                    if path in self.hub.lfs
                    else {}
                )
                for path, size in sizes.items()
            ]
            answer = {"id": match[1], "sha": self.hub.revision(dataset), "siblings": siblings}
            self._json(path, answer | {"private": False, "gated": False, "tags": []})

    def _rows(self, dataset, folders=True):
        root = self.hub.folder / dataset
        rows = []
        for path in self.hub.files(dataset):
            oid = hashlib.sha1(path.read_bytes()).hexdigest()
            name = path.relative_to(root).as_posix()
            rows.append({"type": "file", "path": name, "size": path.stat().st_size, "oid": oid})
        if folders:
            for path in sorted(root.rglob("*")):
                if path.is_dir():
                    name = path.relative_to(root).as_posix()
                    rows.append({"type": "directory", "path": name, "size": 0, "oid": "d" * 40})
        return rows

    def _tree(self, dataset, rest, query):
        below = rest.split("/", 3)[3:]
        prefix = f"{below[0]}/" if below and below[0] else ""
        deep = "recursive=true" in query.lower()
        rows = [row for row in self._rows(dataset) if row["path"].startswith(prefix)]
        return [row for row in rows if deep or "/" not in row["path"].removeprefix(prefix)]

    def _file(self, path, dataset, revision, name):
        for ending, status in self.hub.failures.items():
            if name.endswith(ending):
                return self._failure(path, status)
        dataset = self.hub.root(dataset, revision)
        file = self.hub.folder / dataset / name
        if not dataset:
            return self._send(path, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if not file.is_file():
            return self._send(path, 404, b"", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": self.hub.revision(dataset),
            "Accept-Ranges": "bytes",
        }
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or ""):
            first, last = int(match[1]), int(match[2] or len(content) - 1)
            part = content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
            return self._send(path, 206, part, headers)
        self._send(path, 200, content, headers)

    def _failure(self, path, status):
        self._send(path, status, b"", {"X-Error-Code": self.hub.codes.get(status, "")})

    def _json(self, path, value):
        self._send(path, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, path, status, content, headers=()):
        sent = 0 if self.command == "HEAD" else len(content)
        self.hub.requests.append((self.command, path, self.headers.get("range") or "", sent))
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for ending, count in self.hub.cut.items():
            if sent and path.endswith(ending):
                self.wfile.write(content[:count])
                self.close_connection = True
                return None
        if sent:
            self.wfile.write(content)
