"""The job files that come with titan, and `titan init`, which copies the first of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import titan
from titan.config.options import command_parser

STARTER = "starter"


def folder() -> Path:
    """Return the folder of the shipped jobs: inside the package, or beside it in a checkout."""
    package = Path(titan.__file__).parent
    installed = package / "train_configs"
    return installed if installed.is_dir() else package.parent / "train_configs"


def schema() -> Path:
    """Return the schema of job files: installed with the package, or in the docs of a checkout."""
    package = Path(titan.__file__).parent
    installed = package / "docs" / "schema.json"
    return installed if installed.is_file() else package.parent / "docs" / "schema.json"


def jobs() -> dict[str, Path]:
    """Return the files of the shipped jobs by name, such as "llama3_8b"."""
    return {file.stem: file for file in sorted(folder().glob("*.toml"))}


def about(file: Path) -> str:
    """Return the first comment of a job file, which describes the job."""
    lines = (line for line in file.read_text().splitlines() if line.startswith("# "))
    return next(lines, "# ")[2:]


def copy(name: str, target: Path) -> int:
    """Write a shipped job to a file that does not exist yet. Return the exit code."""
    # The first line tells an editor where the schema is. Its path must work from any folder.
    text = jobs()[name].read_text()
    text = text.replace("#:schema ../docs/schema.json", f"#:schema {schema().as_uri()}", 1)
    if name == STARTER and re.fullmatch(r"[\w.-]+", target.stem):
        # Another run folder keeps a second job from finding the checkpoints of the first job.
        text = text.replace("outputs/first", f"outputs/{target.stem}")
        text = text.replace(" job.toml", f" {target.name}")
    try:
        with target.open("x") as file:
            file.write(text)
    except OSError as error:
        reason = "it exists already" if isinstance(error, FileExistsError) else error.strerror
        print(f"{target}: cannot be written: {reason}", file=sys.stderr)
        return 2
    print(f"wrote {target}; train it with: titan train {target}")
    return 0


def init(argv: list[str]) -> int:
    """Run `titan init`."""
    parser = command_parser("init", summary="Write a commented job file to start from.")
    parser.add_argument(
        "file", nargs="?", type=Path, default=Path("job.toml"), help="default: job.toml"
    )
    return copy(STARTER, parser.parse_args(argv).file)
