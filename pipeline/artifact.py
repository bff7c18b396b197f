"""Artifacts on disk: written beside their place, finished by a manifest, then renamed.

Contract: a reader sees the whole artifact or none. A folder artifact holds `manifest.json`, written
last, with the SHA-256 of every other file; its digest is the digest of that manifest. Paths inside are relative.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config.errors import DataError

MANIFEST = "manifest.json"


def canonical(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_folder(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder by relative path; the folder's own manifest and hidden files are left out."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    names = {p.relative_to(folder).as_posix(): p for p in files}
    return {
        n: digest_file(p) for n, p in names.items() if n != MANIFEST and not any(part.startswith(".") for part in n.split("/"))
    }


def write_json(path: Path, value: object) -> None:
    """Write JSON at once: to a sibling, flushed to disk, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object; DataError says what is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: {what} is missing; `dvc repro` makes it, `dvc checkout` restores it") from error
    except ValueError as error:
        raise DataError(f"{path}: {what} is not readable JSON ({error}); delete it and run `dvc repro`") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: {what} holds {type(value).__name__}, not an object; delete it and run `dvc repro`")
    return value


@contextlib.contextmanager
def publish(folder: Path, facts: Mapping[str, object]) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; on success add the manifest and rename it into place.

    `facts` may still be filled by the caller while inside. A failure leaves `folder` as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    partial.chmod(0o755)
    try:
        yield partial
        for path in partial.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # some writers leave files that only their owner may read
        write_json(partial / MANIFEST, {**facts, "files": digest_folder(partial)})
        if folder.exists():
            old = partial.with_name(partial.name + "-old")
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(folder: Path, what: str) -> dict[str, Any]:
    """The manifest of a published folder."""
    return read_json(folder / MANIFEST, what)


def digest_of(folder: Path, what: str) -> str:
    """The digest of a published folder: of its manifest, which holds the digests of its files."""
    return digest_text(canonical(read_manifest(folder, what)))
