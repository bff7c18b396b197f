"""Files of a hub data set: pinned, fetched once, and one line where they cannot be had.

Would catch: a branch that is taken for a version, a glob that gives what a half-filled cache happens to hold, a download that is
repeated, a traceback without a network, an offline setting that stays lifted.
The hub is a small server on this machine that speaks the few calls the real client makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from pipeline.config.errors import DataError
from pipeline.dataset.reading.hub import hub_name, matches
from pipeline.dataset.reading.read import find_files

pytestmark = pytest.mark.unit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "README.md": b"# rows",
    "data/b.jsonl": b'{"a": 2}\n',
    "data/a.jsonl": b'{"a": 1}\n',
    "data/deep/c.jsonl": b'{"a": 3}\n',
}


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ("hub://owner/name@main/data/a.jsonl", "'main' is not a commit hash"),
        ("hub://owner/name@v1.0/data/a.jsonl", "'v1.0' is not a commit hash"),
        (f"hub://owner/name@{COMMIT[:-1]}/a.jsonl", "is not a commit hash"),
        (f"hub://owner/name@{COMMIT.upper()}/a.jsonl", "is not a commit hash"),
        ("hub://owner/name@/a.jsonl", "'' is not a commit hash"),
        ("hub://owner/name/a.jsonl", "not hub://OWNER/NAME@COMMIT/PATTERN"),
        (f"hub://name@{COMMIT}/a.jsonl", "not hub://OWNER/NAME@COMMIT/PATTERN"),
        (f"hub://owner/name@{COMMIT}", "not hub://OWNER/NAME@COMMIT/PATTERN"),
        (f"hub://owner/name@{COMMIT}/", "not hub://OWNER/NAME@COMMIT/PATTERN"),
        (f"hub://owner/name@{COMMIT}/../a.jsonl", "not hub://OWNER/NAME@COMMIT/PATTERN"),
    ],
)
def test_only_a_commit_names_a_version(stated: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        find_files(tmp_path, [stated])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("data/*.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ("**/*.jsonl", ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"]),
        ("**/c.jsonl", ["data/deep/c.jsonl"]),
        ("*/?.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ("data/[!a].jsonl", ["data/b.jsonl"]),
        ("*", ["README.md"]),
        ("DATA/*", []),
    ],
)
def test_globs_mean_what_they_mean_below_a_folder(pattern: str, names: list[str], tmp_path: Path) -> None:
    assert sorted(name for name in FILES if matches(name, pattern)) == names
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.glob(pattern) if p.is_file()) == names


def test_a_place_names_the_data_set_and_not_the_cache() -> None:
    path = Path(f"/home/x/hub/datasets--owner--some--name/snapshots/{COMMIT}/data/a.jsonl")
    assert hub_name(path) == f"hub://owner/some--name@{COMMIT}/data/a.jsonl"
    assert hub_name(Path("/home/x/data/raw/a.jsonl")) is None


@dataclass
class Hub:
    address: str
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def hub() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self, code: int, content: bytes, **headers: str) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            served.asked.append(f"{self.command} {path}")
            name = path.removeprefix(f"/datasets/owner/name/resolve/{COMMIT}/")
            if path.startswith(f"/api/datasets/owner/name/tree/{COMMIT}"):
                listed = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in FILES.items()]
                self._answer(200, json.dumps(listed).encode(), Content_Type="application/json")
            elif path.startswith("/datasets/owner/name/resolve/") and name in FILES:
                self._answer(200, FILES[name], ETag=f'"{name.encode().hex()}"', X_Repo_Commit=COMMIT)
            else:
                self._answer(404, b"{}", X_Error_Code="EntryNotFound" if name != path else "RepoNotFound")

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


_READ = """
import sys
from pathlib import Path
from pipeline.config.errors import DataError
from pipeline.dataset.reading.read import find_files, read_rows
import huggingface_hub.constants
raw = Path(sys.argv[1])
try:
    rows = [row for path in find_files(raw, sys.argv[2:]) for row in read_rows(path, raw)]
    print(*(f"{row.place} {row.value}" for row in rows), sep="\\n")
except DataError as error:
    print(f"refused: {error}")
assert huggingface_hub.constants.HF_HUB_OFFLINE
"""


def _read(home: Path, address: str, *patterns: str) -> list[str]:
    """What a fresh process reads that is set offline, as the product's stages are."""
    named = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", _READ, str(home / "raw"), *patterns],
        env={**os.environ, **named},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_file_is_fetched_once_and_then_read_without_a_network(hub: Hub, tmp_path: Path) -> None:
    stated = f"hub://owner/name@{COMMIT}/data/a.jsonl"
    assert _read(tmp_path, hub.address, stated) == [f"{stated}:1 {{'a': 1}}"]
    asked = len(hub.asked)
    assert asked
    assert _read(tmp_path, "http://127.0.0.1:9", stated) == [f"{stated}:1 {{'a': 1}}"]
    assert len(hub.asked) == asked


def test_a_glob_is_what_the_data_set_holds_and_not_what_the_cache_does(hub: Hub, tmp_path: Path) -> None:
    base = f"hub://owner/name@{COMMIT}/data"
    _read(tmp_path, hub.address, f"{base}/b.jsonl")
    both = [f"{base}/a.jsonl:1 {{'a': 1}}", f"{base}/b.jsonl:1 {{'a': 2}}"]
    assert _read(tmp_path, hub.address, f"{base}/*.jsonl") == both
    (line,) = _read(tmp_path, "http://127.0.0.1:9", f"{base}/*.jsonl")
    assert line.startswith("refused: ")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (f"hub://owner/name@{COMMIT}/data/none.jsonl", "not to be had from the hub"),
        (f"hub://owner/name@{COMMIT}/none/*.jsonl", "no such file; the data set holds: README.md, data/a.jsonl"),
        (f"hub://owner/other@{COMMIT}/a.jsonl", "not to be had from the hub"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(pattern: str, says: str, hub: Hub, tmp_path: Path) -> None:
    (line,) = _read(tmp_path, hub.address, pattern)
    assert line.startswith(f"refused: '{pattern}'")
    assert says in line


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl"])
def test_no_network_is_one_line(name: str, tmp_path: Path) -> None:
    pattern = f"hub://owner/name@{COMMIT}/{name}"
    (line,) = _read(tmp_path, "http://127.0.0.1:9", pattern)
    assert line.startswith(f"refused: '{pattern}': not to be had from the hub: ")
    assert line.endswith("or put the file into the raw folder")
