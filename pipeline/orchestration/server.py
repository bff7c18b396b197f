"""The Prefect server of one `ladder run`, and the environment Prefect is imported in.

Contract: `start_server` uses the server `PREFECT_API_URL` names, or starts a temporary one on the loopback
interface with its files in `.prefect/`. That one ends with this process, however that ends. Nothing is sent anywhere else.
It comes before the first import of Prefect, which reads its settings from the environment and has still to report when
Python exits: handlers of `atexit` run last in, first out, so the server, entered first, stops after that.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from pipeline.config.errors import RunFailed, UserError

HOME = Path(".prefect")

START_SECONDS = 180.0
"""A first start makes the database: 11 s on two busy cores, 75 s seen in public reports."""

_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The console belongs to the stages; the runs' logs still go to the server.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}

_SERVER_SETTINGS = {
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT__SERVER_EPHEMERAL": "1",  # starts no scheduler and the like, as Prefect's own temporary server does
    "PREFECT__SERVER_FINAL": "1",
}


def start_server() -> Callable[[], None]:
    """Start what is needed and return a function that waits until the server answers; import Prefect meanwhile."""
    os.environ.update({k: v for k, v in {**_SETTINGS, "PREFECT_HOME": str(HOME.resolve())}.items() if k not in os.environ})
    given = os.environ.get("PREFECT_API_URL")
    if given:
        return lambda: _expect_answer(given)
    HOME.mkdir(exist_ok=True)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    with (HOME / "server.log").open("wb") as log:
        process = _start(port, log.fileno())
    atexit.register(_stop, process)
    os.environ["PREFECT_API_URL"] = url
    for name in ("NO_PROXY", "no_proxy"):  # a proxy of the site would be asked for 127.0.0.1 too
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    return lambda: _wait(process, url)


def _start(port: int, log: int) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork

    def before_exec() -> None:
        if libc is not None:  # KILL: nothing of the run depends on a clean end, and SQLite stands it
            libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG

    server = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--lifespan", "on", "--log-level", "error"]
    return subprocess.Popen(
        [sys.executable, *server, "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, **_SERVER_SETTINGS},
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C in a terminal is for the flow, which still reports to the server
        preexec_fn=before_exec,
    )


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(url):
            return
        time.sleep(0.1)
    how = "is not up" if process.poll() is None else f"ended with status {process.returncode}"
    raise RunFailed(
        f"Prefect's temporary server {how} after {START_SECONDS:.0f} s at most; see {HOME / 'server.log'}, or use `dvc repro`"
    )


def _expect_answer(url: str) -> None:
    if not _answers(url):
        raise UserError(f"PREFECT_API_URL = {url}: no server answers there; start it, or unset the variable for a temporary one")


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # a server that wants a key first
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
