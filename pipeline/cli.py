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
