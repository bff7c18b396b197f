"""Artifacts on disk.

Would catch: half an artifact under its final name, an earlier one lost to a failure, a manifest that is there before its
files are, a digest that depends on time, place or order.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.artifact import (
    canonical,
    digest_file,
    digest_folder,
    digest_of,
    digest_text,
    publish,
    read_json,
    read_manifest,
    write_json,
)
from pipeline.config.errors import DataError

pytestmark = pytest.mark.unit


def _publish(folder: Path, content: str, **facts: object) -> None:
    with publish(folder, facts) as inside:
        (inside / "sub").mkdir()
        (inside / "sub/b.txt").write_text(content)
        (inside / "a.txt").write_text("a")


def _everything(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_nothing_under_the_name_until_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "deep/set"
    with publish(folder, {}) as inside:
        (inside / "a.txt").write_text("a")
        assert not folder.exists()
        assert not (inside / "manifest.json").exists()
        assert inside.parent == folder.parent
    assert sorted(_everything(folder)) == ["a.txt", "manifest.json"]
    assert [p.name for p in folder.parent.iterdir()] == ["set"]


def test_manifest_lists_files_and_facts(tmp_path: Path) -> None:
    facts: dict[str, object] = {"rows": 0}
    with publish(tmp_path / "set", facts) as inside:
        (inside / "sub").mkdir()
        (inside / "sub/a.txt").write_bytes(b"a")
        facts["rows"] = 3
    assert read_manifest(tmp_path / "set", "the set") == {
        "rows": 3,
        "files": {"sub/a.txt": digest_file(tmp_path / "set/sub/a.txt")},
    }


def test_a_new_one_replaces_the_whole_of_the_old(tmp_path: Path) -> None:
    _publish(tmp_path / "set", "old")
    (tmp_path / "set/stray.txt").write_text("left over")
    _publish(tmp_path / "set", "new")
    assert sorted(_everything(tmp_path / "set")) == ["a.txt", "manifest.json", "sub/b.txt"]
    assert (tmp_path / "set/sub/b.txt").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), SystemExit(1)], ids=lambda e: type(e).__name__)
def test_a_failure_leaves_the_earlier_one(error: BaseException, tmp_path: Path) -> None:
    _publish(tmp_path / "set", "old")
    before = _everything(tmp_path / "set")

    def fail() -> None:
        with publish(tmp_path / "set", {}) as inside:
            (inside / "a.txt").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert _everything(tmp_path / "set") == before
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_facts_that_are_no_json_leave_the_earlier_one(tmp_path: Path) -> None:
    _publish(tmp_path / "set", "old")
    before = _everything(tmp_path / "set")
    with pytest.raises(ValueError, match="JSON"):
        _publish(tmp_path / "set", "new", loss=float("nan"))
    assert _everything(tmp_path / "set") == before
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_others_may_read_what_a_writer_kept_private(tmp_path: Path) -> None:
    with publish(tmp_path / "set", {}) as inside:
        (inside / "private").write_text("x")
        (inside / "private").chmod(0o600)
    assert (tmp_path / "set").stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "set").iterdir()} == {0o644}


def test_digest_is_of_contents_and_names_alone(tmp_path: Path) -> None:
    _publish(tmp_path / "one", "x", rows=1)
    _publish(tmp_path / "elsewhere/two", "x", rows=1)
    os.utime(tmp_path / "one/a.txt", (1, 1))
    digest = digest_of(tmp_path / "one", "a set")
    assert digest == digest_of(tmp_path / "elsewhere/two", "a set")
    _publish(tmp_path / "one", "y", rows=1)
    assert digest_of(tmp_path / "one", "a set") != digest
    _publish(tmp_path / "one", "x", rows=2)
    assert digest_of(tmp_path / "one", "a set") != digest


def test_folder_digest_leaves_out_manifest_and_hidden_files(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/manifest.json", "manifest.json", ".hidden", ".cache/b", "sub/.gitattributes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert sorted(digest_folder(tmp_path)) == ["a.txt", "sub/manifest.json"]


def test_canonical_is_one_text_per_value() -> None:
    assert canonical({"b": [1, "é"], "a": None}) == canonical({"a": None, "b": [1, "é"]}) == '{"a":null,"b":[1,"é"]}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("inf"))


def test_known_digests(tmp_path: Path) -> None:
    """SHA-256 of `abc`, from FIPS 180-4's example."""
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "abc").write_bytes(b"abc")
    assert digest_text("abc") == digest_file(tmp_path / "abc") == known


def test_json_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new/metrics.json"
    write_json(path, {"a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "é"\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": 1, "b": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}


@pytest.mark.parametrize(
    ("content", "said"), [(None, "missing"), ("{", "not readable JSON"), ("[1]", "holds list"), ("\x80", "JSON")]
)
def test_unreadable_json_says_what_it_was_to_be(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=rf"x\.json: the verdict .*{said}.*dvc repro"):
        read_json(path, "the verdict")
