"""The console command `ladder`.

Contract: an error of `config/errors.py` is one line on stderr, `ladder: ...`, and its exit code. Libraries are
imported by the verb that needs them, so that `--help` is immediate.

Command: `ladder VERB --help`, or `python -m pipeline.cli`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.config.errors import ConfigError, LadderError

SCHEMA_FOLDER = Path("docs/schema")

app = typer.Typer(
    help="Supervised fine-tuning that climbs from a laptop to a cluster, rung by rung.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich costs a quarter of the time of `--help`
)


@app.command()
def run(
    target: Annotated[str | None, typer.Argument(help="A stage of dvc.yaml, with what it needs; all stages if left out.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run also what is unchanged.")] = False,
) -> None:
    """Run the stages that are stale, as a Prefect flow."""
    from pipeline.config.schema import load_params
    from pipeline.orchestration import dag
    from pipeline.orchestration.server import start_server

    load_params(Path("params.yaml"))  # a mistake there, or in the target, is told before anything starts
    dag.stages(target)
    wait_for_server = start_server()
    from pipeline.orchestration import flow  # while the server starts

    wait_for_server()
    flow.run(target, force=force)


@app.command()
def status() -> None:
    """Show what is up to date, stale, running and proved, and the results, from files alone."""
    from pipeline.orchestration.status import status_text

    print(status_text())


@app.command()
def schema(
    check: Annotated[bool, typer.Option("--check", help="Compare the published files with the code; write nothing.")] = False,
) -> None:
    """Write the JSON schemas of params.yaml and the profiles to docs/schema."""
    from pipeline.config.schema import PUBLISHED, json_schema

    texts = {SCHEMA_FOLDER / name: json_schema(model) for name, model in PUBLISHED.items()}
    differing = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check:
        if differing:
            raise SchemaDiffers(f"{', '.join(map(str, differing))}: not what the code says; `ladder schema` writes it")
        return
    if not Path("dvc.yaml").is_file():
        raise ConfigError(f"{SCHEMA_FOLDER}: would be written into {Path.cwd()}; run from the root of the repository")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


@app.command()
def masks(
    count: Annotated[int, typer.Argument(metavar="[N]", min=1, help="Packed sequences to show.")] = 3,
    split: Annotated[str, typer.Option("--split", help="train or validation.")] = "train",
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead of showing them here.")
    ] = None,
) -> None:
    """Show decoded samples of the packed data: what is trained on, what is context."""
    from pipeline.dataset.manifest import SPLITS

    if split not in SPLITS:
        raise ConfigError(f"--split {split}: must be one of {', '.join(SPLITS)}")
    from pipeline.reporting import masks

    report = masks.read(masks.paths_of(Path("dvc.yaml")), split, count)
    if html is None:
        from rich.console import Console

        masks.show(report, Console(soft_wrap=True))
        return
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(masks.page(report), encoding="utf-8")
    print(html)


bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")


@bench.command()
def data(
    rows: Annotated[int, typer.Option(help="Rows to generate.", min=1)] = 20_000,
    inputs: Annotated[list[Path] | None, typer.Option("--input", help="A file of rows instead; may be repeated.")] = None,
    model: Annotated[Path, typer.Option(help="Folder with the tokenizer.")] = Path("models/base"),
    max_length: Annotated[int, typer.Option(help="Tokens per sequence.", min=8)] = 2048,
    reference: Annotated[
        str | None, typer.Option(help="A command to compare with; {model}, {rows} and {max_length} are filled in.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Runs of each, in turn; medians are shown.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time `format` and `pack` on generated rows or files."""
    import dataclasses
    import json

    from pipeline.planning.bench import bench_data, table

    found = bench_data(rows, inputs or [], model, max_length, reference, rounds)
    print(json.dumps(dataclasses.asdict(found), indent=2) if as_json else table(found))


@bench.command()
def train(
    shape: Annotated[str, typer.Option(help="tiny, 0.5b, 1.5b, 8b, 13b, or a folder with a config.json.")],
    ranks: Annotated[int, typer.Option(help="Processes: GPUs of this machine, or CPU ranks.", min=1)] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Plans whose name holds this; may be repeated.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds after which a plan is given up.", min=1)] = 600,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write JSON here as well.")] = None,
) -> None:
    """Time training plans on random weights: tokens/s, MFU, memory, communication."""
    from pipeline.planning import training_bench

    chosen = [plan for plan in training_bench.plans(shape, ranks) if not only or any(part in plan.name for part in only)]
    if not chosen:
        names = "; ".join(plan.name for plan in training_bench.plans(shape, ranks))
        raise ConfigError(f"--only {' '.join(only or [])}: no plan is called so; there are: {names}")
    measured: list[training_bench.Measured] = []
    for row in training_bench.bench_train(shape, ranks, chosen, time_limit):
        measured.append(row)
        if json_file is not None:
            json_file.write_text(training_bench.as_json(shape, ranks, measured) + "\n", encoding="utf-8")
    print(training_bench.table(shape, ranks, measured))


class SchemaDiffers(LadderError):
    """The published schema is not the code's."""


def main() -> None:
    """The entry point: every LadderError becomes one line and its exit code."""
    try:
        app(prog_name="ladder")
    except LadderError as error:
        print(f"ladder: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
