"""Files of a data set on the Hugging Face hub at one commit; beside the base model the only use of a network.

Contract: `hub://OWNER/NAME@COMMIT/PATTERN`, COMMIT being 40 hex digits: a branch or a tag moves, and with it what a run means.
A file that the cache already has is taken from there without a network. A glob asks the hub which files there are, since a cache
may hold some of them only. DataError in one line where the hub does not answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.config.errors import DataError

SCHEME = "hub://"

_FORM = re.compile(r"hub://(?P<id>[\w.-]+/[\w.-]+)@(?P<revision>[^/]*)/(?P<pattern>.+)")
_IN_CACHE = re.compile(r"datasets--(?P<owner>.+?)--(?P<name>.+?)/snapshots/(?P<revision>[0-9a-f]{40})/(?P<file>.+)")


def find_hub_files(stated: str) -> list[Path]:
    """Local copies of the files that one hub pattern names, sorted by their path in the data set."""
    form = _FORM.fullmatch(stated)
    if form is None or ".." in form["pattern"].split("/"):
        raise DataError(
            f"'{stated}': not hub://OWNER/NAME@COMMIT/PATTERN, such as hub://tatsu-lab/alpaca@<40 hex digits>/data/*.parquet"
        )
    if not re.fullmatch(r"[0-9a-f]{40}", form["revision"]):
        raise DataError(
            f"'{stated}': '{form['revision']}' is not a commit hash of 40 hex digits; a branch or a tag moves, so write the "
            "commit that the data set's history shows"
        )
    if not any(c in form["pattern"] for c in "*?["):
        return [_fetched(stated, form["id"], form["revision"], form["pattern"])]
    there = _listed(stated, form["id"], form["revision"])
    names = [name for name in there if matches(name, form["pattern"])]
    if not names:
        raise DataError(f"'{stated}': no such file; the data set holds: {', '.join(there[:20]) or 'nothing'}")
    return [_fetched(stated, form["id"], form["revision"], name) for name in names]


def hub_name(path: Path) -> str | None:
    """`hub://...` of a file in the hub's cache, None for any other."""
    found = _IN_CACHE.search(path.as_posix())
    return f"{SCHEME}{found['owner']}/{found['name']}@{found['revision']}/{found['file']}" if found else None


def matches(name: str, pattern: str) -> bool:
    """Whether a path fits a glob as pathlib reads it: `*` stays within a folder, `**` is any number of folders."""
    return _fit(name.split("/"), pattern.split("/"))


def _fit(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return _fit(names, patterns[1:]) or (bool(names) and _fit(names[1:], patterns))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _fit(names[1:], patterns[1:])


def _listed(stated: str, repository: str, revision: str) -> list[str]:
    with _online(stated):
        from huggingface_hub import HfApi

        return sorted(HfApi().list_repo_files(repository, revision=revision, repo_type="dataset"))


def _fetched(stated: str, repository: str, revision: str, name: str) -> Path:
    import huggingface_hub

    hub: Any = huggingface_hub  # its types are partly unknown

    cached = hub.try_to_load_from_cache(repository, name, revision=revision, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    with _online(stated):
        return Path(hub.hf_hub_download(repository, name, revision=revision, repo_type="dataset"))


@contextmanager
def _online(stated: str) -> Generator[None]:
    """Lift the product's offline setting for a moment, and put the client's errors into one line."""
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")
    constants.HF_HUB_OFFLINE = False
    os.environ["HF_HUB_OFFLINE"] = "0"
    try:
        get_session().head(constants.ENDPOINT, timeout=10)  # without a network the client itself gives up after 24 s
        yield
    except Exception as error:  # the client's errors share no base: HTTP, connection, validation, disk
        lines = str(error).strip().splitlines()
        raise DataError(
            f"'{stated}': not to be had from the hub: {lines[0] if lines else type(error).__name__}; check id, commit, path, "
            "network and token (HF_TOKEN), or put the file into the raw folder"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before[0]
        if before[1] is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before[1]
