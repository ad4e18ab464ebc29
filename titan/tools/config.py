"""Command `titan config`: a job with all its keys, the jobs that come with titan, or the schema of job files. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from titan.checks.rules import check as check_rules
from titan.config.errors import ConfigError, choose, readable
from titan.config.load import load_from_argv
from titan.config.options import known_options, mistake, put_json
from titan.config.render import json_schema, to_toml

from .shipped import about, copy, jobs
from .tables import parser_of


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. titan.cli reports a `ConfigError`."""
    parser = parser_of("config")
    options, job = parser.parse_known_args(argv)
    if (options.schema or options.list is not None) and job:
        raise mistake(job[0], "is no option, and --list and --schema need no job")
    if options.output and not options.list:
        raise mistake("--output", "goes with --list NAME")
    if options.schema:
        put_json(json_schema(), options.json or "-", indent=1)
        return 0
    if options.list is not None:
        return _shipped(options.list, options.output, options.json)
    # Broken rules are reported together with wrong keys: the readable part of the config is checked.
    problems = []
    resolved = readable(problems, load_from_argv, job, options=known_options(parser))
    if resolved is not None:
        problems += check_rules(resolved)
    if problems or resolved is None:
        raise ConfigError(problems)
    if not put_json(resolved.model_dump(mode="json"), options.json):
        print(to_toml(resolved, comments=options.comments), end="")
    return 0


def _shipped(name: str, target: Path | None, json: str | None) -> int:
    known = jobs()
    if put_json({job: about(file) for job, file in known.items()}, json):
        return 0
    if not name:
        width = max(map(len, known))
        print("\n".join(f"{job:{width}}  {about(file)}" for job, file in known.items()))
        return 0
    if name not in known:
        raise mistake("--list", f"there is no job '{name}'{choose(name, known)}")
    if target is not None:
        return copy(name, target, {})
    print(known[name].read_text(), end="")
    return 0
