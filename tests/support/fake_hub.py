"""A Hugging Face hub on 127.0.0.1 that speaks what `huggingface_hub` needs to download a snapshot.

Large files are redirected to another host, as to the hub's CDN, and can be cut off in the middle.
"""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse

from huggingface_hub import close_session, constants
from waiting import PATIENCE

LARGE = (".safetensors", ".gguf", ".bin")


@dataclasses.dataclass
class Repo:
    """Files by commit, and the commits that branches and tags name."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str | None = None
    is_gated: bool = False


@dataclasses.dataclass
class FakeHub:
    """Repositories by id, the requests received, and after how many bytes a file's next answer is cut.

    `xet` are hashes of files in the Xet store whose address is `xet_store`. Without ranges it sends whole files only.
    """

    url: str = ""
    cdn: str = ""
    repos: dict[str, Repo] = dataclasses.field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = dataclasses.field(default_factory=list)
    cuts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    xet: dict[str, str] = dataclasses.field(default_factory=dict)
    xet_store: str = ""
    has_ranges: bool = True

    def downloads(self):
        """Names of the files whose content has been sent, each with the range that was requested, if any."""
        sent = [(path, span) for method, path, span in self.requests if method == "GET" and "/api/" not in path]
        return sorted((path.rpartition("/")[2], span or "") for path, span in sent)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path == "/api/xet-token":
            return self._send_json({"accessToken": "x", "exp": 2**40, "casUrl": self.hub.xet_store})
        for pattern, answer in (
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self._info),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
            (r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", self._content),
        ):
            if match := re.fullmatch(pattern, path):
                name, revision, *rest = match.groups()
                return self._checked(answer, name, revision or "main", *rest)
        return self._refuse(404, "EntryNotFound")

    def _checked(self, answer, name, revision, *rest):
        repo = self.hub.repos.get(name)
        is_signed = self.path.startswith("/cdn/")
        if is_signed and self.headers.get("Authorization"):
            return self._refuse(400, "TokenSentToTheCDN")
        if repo is None or (
            not is_signed and repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"
        ):
            if repo is not None and repo.is_gated:
                return self._refuse(401, "GatedRepo")
            return self._refuse(401, "RepoNotFound")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        return answer(name, commit, repo.commits[commit], *rest)

    def _refuse(self, status, code):
        self._send(status, b"", {"X-Error-Code": code})

    def _info(self, name, commit, files):
        siblings = [{"rfilename": file} for file in files]
        self._send_json({"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings})

    def _tree(self, _name, _commit, files):
        entries = []
        for file, content in files.items():
            entry = {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            if file.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        self._send_json(entries)

    def _file(self, name, commit, files, file):
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        content = files[file]
        if not file.endswith(LARGE):
            etag = hashlib.sha1(content).hexdigest()
            return self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
        etag = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
        if file in self.hub.xet:
            linked |= {"X-Xet-Hash": self.hub.xet[file], "X-Xet-Refresh-Route": f"{self.hub.url}/api/xet-token"}
        return self._send(302, b"", linked | {"Location": f"{self.hub.cdn}/cdn/{name}/{commit}/{file}"})

    def _content(self, _name, _commit, files, file):
        content, status, headers = files[file], 200, {"Accept-Ranges": "bytes"}
        if (span := self.headers.get("Range")) and self.hub.has_ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", span)[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        cut = self.hub.cuts.get(file)
        self._send(status, content, headers, cut=cut.pop(0) if cut else None)

    def _send_json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status, content, headers, *, cut=None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


@contextlib.contextmanager
def running_hub(monkeypatch, cache):
    """A FakeHub that is the hub of this process until the test ends, with a cache of its own."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.cdn = f"http://localhost:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", PATIENCE)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", PATIENCE)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        close_session()  # its connections would outlive the server
        server.shutdown()
        thread.join()
        server.server_close()
