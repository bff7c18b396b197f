"""How fast raw rows become packed tokens on this machine: the stages `format` and `pack`, run as dvc.yaml states them.

Contract: works in a temporary folder with the rows, the tokenizer files of a base model and this project's params.yaml, of
which only the sources and `pack.max_length` are replaced. Times are of whole commands, start of Python included. Nothing
of the project is written.

Command: ladder bench data --rows 20000
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import read_json
from pipeline.config.errors import ConfigError, DataError, ModelError, RunFailed
from pipeline.config.schema import load_params
from pipeline.environment import cores
from pipeline.fingerprint import ROOT

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
STAGES = ("format", "pack")
SAMPLE_SECONDS = 0.5
"""How often memory is looked at; a look takes 2 ms for a process of a gigabyte."""


@dataclass(frozen=True)
class Timing:
    """One command: seconds of wall clock, tokens it reports per second, largest memory of all its processes together."""

    what: str
    seconds: float
    tokens_per_second: int
    peak_gib: float


@dataclass(frozen=True)
class DataBench:
    """Medians over the rounds. `ratio`: seconds of the reference, as it reports them itself, to ours of both stages."""

    rows: int
    tokens: int
    fill: float
    max_length: int
    engine: str
    cores: int
    timings: tuple[Timing, ...]
    ratio: float | None


def bench_data(rows: int, inputs: Sequence[Path], model: Path, max_length: int, reference: str | None, rounds: int) -> DataBench:
    """Measure on `rows` generated rows, or on the rows of files.

    reference: a command with {model}, {rows} and {max_length} in it, whose last line of output is JSON with `tokens` and
    `seconds`; it is run in turn with ours, on the same rows.
    """
    if not (model / "tokenizer.json").is_file():
        raise ModelError(f"{model}: no tokenizer.json; name a folder that has one with --model, or run `dvc repro base`")
    missing = [path for path in inputs if not path.is_file()]
    if missing:
        raise DataError(f"{missing[0]}: no such file; --input names files of rows")
    if reference and len(inputs) > 1:
        raise ConfigError(f"--reference takes one file of rows, --input names {len(inputs)}; join them")
    with tempfile.TemporaryDirectory(prefix="ladder-bench-") as name:
        folder = Path(name)
        files = _prepare(folder, rows, inputs, model, max_length)
        measured: dict[str, list[Timing]] = {stage: [] for stage in STAGES}
        for _ in range(rounds):
            for stage in STAGES:
                seconds, peak, _ = _timed(_command(stage), folder)
                measured[stage].append(Timing(stage, seconds, 0, peak))
            if reference:
                filled = reference.format(
                    model=model.resolve(), rows=(folder / "data/raw" / files[0]).resolve(), max_length=max_length
                )
                measured.setdefault("reference", []).append(_reference(filled))
        formatted, packed = (read_json(folder / f"metrics/{stage}.json", f"the metrics of {stage}") for stage in STAGES)
    tokens: int = packed["tokens_in"]
    timings = [_median(runs, tokens) for runs in measured.values()]
    both = sum(t.seconds for t in timings[:2])
    timings.insert(2, Timing("format + pack", round(both, 3), round(tokens / both), max(t.peak_gib for t in timings[:2])))
    return DataBench(
        rows=formatted["rows_in"],
        tokens=tokens,
        fill=packed["fill"],
        max_length=max_length,
        engine=packed["engine"],
        cores=cores(),
        timings=tuple(timings),
        ratio=round(timings[3].seconds / both, 2) if reference else None,
    )


def table(found: DataBench) -> str:
    """The figures for a person."""
    lines = [
        f"{found.rows:,} rows, {found.tokens:,} tokens, fill {found.fill:.2%} at {found.max_length}, engine {found.engine}, "
        f"{found.cores} cores",
        f"{'':16}{'seconds':>10}{'tokens/s':>14}{'peak GiB':>10}",
    ]
    lines += [f"{t.what:16}{t.seconds:>10.2f}{t.tokens_per_second:>14,}{t.peak_gib:>10.2f}" for t in found.timings]
    if found.ratio is not None:
        lines.append(f"format + pack is {found.ratio:.1f} times as fast as the reference (its own clock, without its imports)")
    return "\n".join(lines)


def generated_rows(count: int, seed: int = 1) -> Iterator[dict[str, str]]:
    """Distinct prompt/completion rows, 60 % English-like and 40 % Chinese; lengths are lognormal, median 200 words or
    characters with sigma 0.9, a third of it prompt; words and characters follow Zipf's law, as caches of tokenizers expect."""
    chance = random.Random(seed)
    syllable = [
        part.split(",") for part in ("b,c,d,f,g,h,l,m,n,p,r,s,t,st,tr,ch,sh,th,w", "a,e,i,o,u,ea,ou,ai", ",n,r,s,t,l,m,d")
    ]
    words = sorted({"".join(chance.choice(part) for part in syllable * chance.randint(1, 3)) for _ in range(30_000)})
    chance.shuffle(words)
    letters = [chr(code) for code in chance.sample(range(0x4E00, 0x9FA5), 3_000)]
    weights = {id(pool): _zipf(len(pool)) for pool in (words, letters)}
    for number in range(count):
        chinese = chance.random() < 0.4
        pool, joint, mark = (letters, "", "。") if chinese else (words, " ", ". ")
        length = max(8, min(6_000, round(200 * chance.lognormvariate(0, 0.9))))
        drawn = chance.choices(pool, cum_weights=weights[id(pool)], k=length)
        text = [joint.join(drawn[i : i + 14]) for i in range(0, length, 14)]
        border = max(1, len(text) // 3)
        yield {"prompt": mark.join(text[:border]) + f" ({number})", "completion": mark.join(text[border:]) or str(number)}


def _zipf(count: int) -> list[float]:
    total, found = 0.0, list[float]()
    for rank in range(1, count + 1):
        total += 1 / rank
        found.append(total)
    return found


def _prepare(folder: Path, rows: int, inputs: Sequence[Path], model: Path, max_length: int) -> list[str]:
    """The temporary project; returns the names of the raw files."""
    from ruamel.yaml import YAML

    raw, base = folder / "data/raw", folder / "models/base"
    for made in (raw, base):
        made.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        if (model / name).is_file():
            shutil.copy(model / name, base)
    files = [f"{number}-{path.name}" for number, path in enumerate(inputs)] or ["rows.jsonl"]
    for name, path in zip(files, inputs, strict=False):
        (raw / name).symlink_to(path.resolve())
    if not inputs:
        with (raw / files[0]).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in generated_rows(rows))
    source = Path("params.yaml") if Path("params.yaml").is_file() else ROOT / "params.yaml"
    params: dict[str, Any] = YAML(typ="safe", pure=True).load(source.read_text(encoding="utf-8"))
    params["format"]["sources"] = [{"files": files, "record": "auto", "columns": {}, "weight": 1.0, "limit": None}]
    params["pack"]["max_length"] = max_length
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(params, file)
    load_params(folder / "params.yaml")
    return files


def _command(stage: str) -> list[str]:
    from ruamel.yaml import YAML

    stages: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return [sys.executable, *shlex.split(stages[stage]["cmd"])[1:]]


def _timed(command: Sequence[str], folder: Path) -> tuple[float, float, str]:
    """Seconds, peak GiB and output of a command; RunFailed with its last line if it fails."""
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        samples, ended = [0], threading.Event()
        watch = threading.Thread(target=_watch, args=(process.pid, samples, ended))
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)  # unlike RUSAGE_CHILDREN, of this child alone
        seconds = time.perf_counter() - start
        ended.set()
        watch.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().strip()
    if process.returncode:
        raise RunFailed(f"{shlex.join(command)}: ended with {process.returncode}: {(said.splitlines() or ['no output'])[-1]}")
    return seconds, max(usage.ru_maxrss, *samples) / 2**20, said


def _watch(pid: int, samples: list[int], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_SECONDS):
        samples.append(_memory(pid))


def _memory(pid: int) -> int:
    """KiB of a process and all that it started, a page that several share counted once (proportional set size)."""
    found, waiting = 0, [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            lines = (folder / "smaps_rollup").read_text(encoding="ascii").splitlines()
            waiting += (int(child) for task in folder.glob("task/*/children") for child in task.read_text().split())
        except OSError:  # it has ended, or there is no procfs
            continue
        found += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return found


def _reference(command: str) -> Timing:
    seconds, peak, said = _timed(shlex.split(command), Path.cwd())
    try:
        told = json.loads(said.splitlines()[-1])
        return Timing("reference", float(told["seconds"]), round(told["tokens"] / told["seconds"]), peak)
    except (ValueError, LookupError, TypeError) as error:
        raise RunFailed(f"{command}: its last line is no JSON with tokens and seconds, after {seconds:.0f} s") from error


def _median(runs: Sequence[Timing], tokens: int) -> Timing:
    seconds = statistics.median(run.seconds for run in runs)
    peak = max(run.peak_gib for run in runs)
    rate = runs[0].tokens_per_second and round(statistics.median(run.tokens_per_second for run in runs))
    return Timing(runs[0].what, round(seconds, 3), rate or round(tokens / seconds), round(peak, 3))
