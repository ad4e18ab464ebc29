"""Command `titan certify JOB.toml [--layouts all|tp,pp,...] [--world-size N] [--output FOLDER]`.

The first row compares one process with the program that the model comes from, such as transformers (source.py). Then each layout trains
the small job of shrink.py on gloo ranks, and is compared with one process. A row says `equal`, `refused`, with the reason of the config
check, `differs`, with the module that is wrong, or `unknown`: not compared. Rows are printed, and written as JSON and Markdown.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import distributions
from itertools import chain, combinations, starmap
from math import prod
from pathlib import Path
from typing import Any, Protocol

import titan
from titan.base.run_folder import git_state
from titan.base.run_writer import write_text_atomically
from titan.base.untrusted import InputError
from titan.checkpoint.identity import differing, freedom, settings
from titan.checks.rules import check_to_run, load_to_run
from titan.config.errors import ConfigError, choose
from titan.config.layout import AXES, Layout, degrees_of, stage_split
from titan.config.load import load_from_argv
from titan.config.model import family
from titan.config.options import (
    check_target,
    known_options,
    mistake,
    put_json,
)
from titan.config.plug_ins import door, parts_of
from titan.config.quantize import eight_bit_sections, quantize_section
from titan.config.schema import JobConfig
from titan.numerics.diff.compare import compare, parameters_only
from titan.numerics.tables import TABLES, parser_of

from .ranks import MORE, Pool, RankFailed
from .shrink import BATCH, changed, small_keys

Degrees = Mapping[str, int]
LAYOUTS: dict[str, Degrees] = TABLES["layouts"]
_OWN = "job"
_CUT = 1e-6  # the same operations on the same numbers
_MOST_AXES = 3  # of two ranks each
# One value in thousands that falls on the other side of a kink changes a gradient by less.
_DRAWS, _ROUNDING = 5, 0.1


@dataclass(frozen=True, kw_only=True)
class CertifiedLayout:
    """Verdict about a layout.

    Attributes:
        name: name of the layout.
        mesh: its axes.
        verdict: "equal", "refused", "differs", "failed" or "unknown".
        reason: reason of a refusal or a failure, or the module that differs.
        differences: the largest relative differences.
        draw: number of the weights and tokens that this holds for.
    """

    name: str
    mesh: str = ""
    verdict: str
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    draw: int = 1

    def __str__(self) -> str:
        parts = [self.reason] if self.reason else []
        if self.differences:
            parts.append(f"largest difference {max(self.differences.values()):.1e}")
        if self.draw > 1:
            parts.append(f"draw {self.draw}: a rounding may explain the differences before")
        return f"{self.verdict} ({'; '.join(parts)})"


@door("certify")
class CertifySource(Protocol):
    """Function that compares with the program that a model comes from. None: it does not know the model."""

    def __call__(self, certifier: Certifier, /) -> CertifiedLayout | None: ...


class Certifier:
    """Comparison of the layouts of a job with one process.

    Attributes:
        program: what a rank runs to train a job.
        cut: what it runs to cut the model of a job.
    """

    def __init__(self, config: JobConfig, layout: Layout) -> None:
        """Shrink a job.

        Args:
            config: the job.
            layout: its layout.
        """
        from titan.numerics.certify import steps

        self.program, self.cut = steps.train_job, steps.cut_differences
        self.config, self.layout = config, layout
        self.keys = small_keys(config, tp=layout.tp)
        self.small, self.is_8bit = changed(config, self.keys), bool(eight_bit_sections(config))
        more = MORE if self.is_8bit or config.compile.enable else ()
        self.pool = Pool([f"{family(config.model.name).__name__}.model", *more], quiet=True)
        self.runs: dict[str, Any] = {}

    def layouts(self, names: Sequence[str] | None) -> dict[str, Degrees]:
        """Return the layouts with these names, or all that the model has a use for.

        "job" stands for the job's own, or for all its subsets of three axes. A layout that somebody named is a row in any case.
        """
        own = {axis: 2 for axis, degree in self.layout.degrees.items() if degree > 1}
        subsets = combinations(own, min(len(own), _MOST_AXES))
        has_ep = self.config.parallelism.expert_parallel_degree > 1
        found: dict[str, Degrees] = {}
        for axes in subsets if names is None or _OWN in names else ():
            degrees = dict.fromkeys(axes, 2)
            if has_ep and {*axes} - {"pp", "dp_replicate"}:
                degrees["ep"] = 2
            found[_OWN if len(own) <= _MOST_AXES else f"{_OWN}: {_mesh(degrees)}"] = degrees
        if names is not None:
            return found | {n: d for n, d in LAYOUTS.items() if n in names}
        known, has_experts = [*found.values()], self.config.model.sizes.num_experts > 0
        return found | {
            name: degrees
            for name, degrees in LAYOUTS.items()
            if degrees not in known and (has_experts or "ep" not in degrees)
        }

    def certify_source(self) -> CertifiedLayout:
        """Return the verdict about one process and the program that the model comes from."""
        for certify in parts_of(CertifySource):
            if row := certify(self):
                return row
        return CertifiedLayout(
            name="source", verdict="unknown", reason="nothing installed has it"
        )

    def certify(self, name: str, degrees: Degrees) -> CertifiedLayout:
        """Return the verdict about a layout.

        Rounding may move a value near 0 across the corner of a ReLU, or a token to another expert. So a difference that rounding
        can make is tried again with other weights and tokens: a fault comes back.
        """
        row = partial(CertifiedLayout, name=name, mesh=_mesh(degrees))
        world = prod(n for axis, n in degrees.items() if axis != "ep")
        keys, seed = self._keys(degrees), self.config.debug.seed
        try:
            # First in the sizes of the job, since its errors name them. The job's own layout has been checked.
            whole = self.config
            if name != _OWN:
                shared = {k: v for k, v in self.keys.items() if k.startswith("parallelism.")}
                whole = changed(self.config, {"phase": [], **shared, **keys})
                check_to_run(whole, world_size=world)
            check_to_run(changed(self.small, keys), world_size=world)
            uncut, deeper = "", {}
            if "pp" in degrees:
                own = self.config if name.startswith(_OWN) else whole
                wrong, uncut, deeper = self._cuts(own, degrees)
                if wrong:
                    return row(verdict="differs", reason=wrong)
            for draw in range(1, _DRAWS + 1):
                drawn, is_last = {**deeper, "debug.seed": seed + draw - 1}, draw == _DRAWS
                found = row(draw=draw, **self._compare(degrees, world, drawn, is_last=is_last))
                if found.verdict != "differs" or found.reason:
                    break
            return replace(found, reason=found.reason or uncut)  # pyrefly: ignore[unbound-name]
        except ConfigError as error:
            problem = error.problems[0]
            return row(verdict="refused", reason=f"{problem.key}: {problem.message}")
        except RankFailed as error:
            verdict = "refused" if error.cause.refuses else "failed"
            return row(verdict=verdict, reason=error.cause.line)

    def _cuts(self, whole: JobConfig, degrees: Degrees) -> tuple[str, str, dict[str, Any]]:
        """Cut the model of a job, with small values at its own depth.

        Returns:
            What is wrong with the job's stages; where else the model could not be cut; keys of a small job that is cut elsewhere.
        """
        from .steps import parted

        deep = self._deep(whole.model.sizes.n_layers)
        one = changed(self.small, {**self._keys({}, alone=True), **TABLES["uncut"], **deep})
        depth = one.model.sizes.n_layers  # few, if the family's shrink() knows no other
        if depth < whole.model.sizes.n_layers:
            whole = changed(self.small, self._keys(degrees))
        modules = stage_split(whole, num_layers=depth).modules
        [found] = self.pool.run(1, self.cut, one, modules)
        wrong = parted(found, _CUT)
        if cut := next((name for name in _starts(modules) if name in wrong), ""):
            lacks = "the stage gets one tensor from the stage before, and reads more of it"
            return f"cut before {cut}: {wrong[cut]}; {lacks}", "", {}
        if not wrong:
            return "", "", {}
        small = changed(self.small, self._keys(degrees))
        for n_layers in range(small.model.sizes.n_layers, depth + 1):
            if wrong.keys().isdisjoint(
                _starts(stage_split(small, num_layers=n_layers).modules)
            ):
                break
        return "", f"not to be cut before {', '.join(wrong)}", self._deep(n_layers)

    def _deep(self, n_layers: int) -> dict[str, Any]:
        """Return the keys of the small job that depend on the number of layers."""
        keys = small_keys(self.config, tp=self.layout.tp, n_layers=n_layers)
        return {name: keys[name] for name in keys.keys() & {"model.overrides", "model.freeze"}}

    def _keys(self, degrees: Degrees, *, alone: bool = False) -> dict[str, Any]:
        """Return the keys of a layout, or of the one process that it is compared with."""
        dp = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
        passes, parts = 1 + (self.layout.accumulation > 1), {} if alone else degrees
        if alone:
            # The scale of a tensor in 8 bits is that of the sequences that are multiplied at once.
            by_dp = BATCH if "pp" in degrees else dp * passes
            dp, passes = 1, by_dp if self.is_8bit else 1
        keys: dict[str, Any] = {
            **{key: parts.get(axis, 1) for axis, key in AXES.items()},
            "parallelism.expert_parallel_degree": parts.get("ep", 1),
            "training.global_batch_size": BATCH,
            "training.local_batch_size": BATCH // dp // passes,
        }
        if not {"dp_shard", "cp"} & parts.keys():  # DDP gathers nothing, and scatters nothing
            keys |= TABLES["unsharded"]
        recipe = self.config.quantize.linear.float8.recipe_name or "tensorwise"
        if self.is_8bit and "cp" in degrees and recipe == "tensorwise":
            # A context-parallel rank scales its part of a tensor, which no process alone does. Rows are the same.
            keys |= TABLES["rowwise"]
        return keys

    def _compare(
        self, degrees: Degrees, world: int, drawn: dict[str, Any], *, is_last: bool
    ) -> dict[str, Any]:
        """Return verdict and differences of a layout, and the reason if they are beyond rounding or the draw is the last."""
        from titan.numerics.certify import steps

        small = changed(self.small, {**self._keys(degrees), **drawn})
        results = self.run(small, world)
        if reason := next((result["refused"] for result in results if "refused" in result), ""):
            return {"verdict": "refused", "reason": reason}
        keys = {**self._keys(degrees, alone=True), **drawn}
        if (section := quantize_section(small)) is not None:
            # In some layouts, titan leaves layers alone that it converts in one process.
            kept = sorted({name for result in results for name in result["kept"]})
            for name in ("float8", "mx"):
                keys[f"quantize.linear.{name}.filter_fqns"] = [*section.filter_fqns, *kept]
        alone = changed(self.small, keys)
        assert all(map(freedom, differing(settings(small), settings(alone))))
        [reference] = self.run(alone, 1)
        if small.training.max_norm > max(reference["norms"]):
            return {"verdict": "unknown", "reason": "no step of the small job clips"}
        limits = steps.bounds(
            is_8bit=self.is_8bit,
            adds_in_parts=bool({"tp", "cp"} & degrees.keys()),
            has_8bit_moments=self.config.optimizer.name == "AdamW8bit",
        )
        found = {w: steps.ratios(results, reference, w, steps.LEAST) for w in steps.WHAT}
        largest = {what: max(each.values()) for what, each in found.items() if each}
        if all(largest[what] <= limits[what] for what in largest):
            return {"verdict": "equal", "differences": largest}
        if not is_last and max(largest.values()) < _ROUNDING:
            return {"verdict": "differs", "differences": largest}
        # In second runs, since hooks would be compiled with the modules.
        off = {"compile.enable": False}
        two = self.run(changed(small, off), world, recorded=True)[0]
        one, moved = (
            self.run(changed(alone, off), 1, recorded=True, perturbed=seed)[0]
            for seed in (0, 1)
        )
        module = compare(one["recorded"], two["recorded"], moved["recorded"]).first
        if why := parameters_only(one["recorded"]):
            module = f"{module}; {why}"
        return {"verdict": "differs", "reason": module, "differences": largest}

    def run(
        self, config: JobConfig, world: int, *, recorded: bool = False, perturbed: int = 0
    ) -> list[dict[str, Any]]:
        """Return the results of the ranks. One process runs each job once."""
        key = f"{world} {recorded} {perturbed} {config.model_dump_json()}"
        if key not in self.runs or world > 1:
            self.runs[key] = self.pool.run(world, self.program, config, recorded, perturbed)
        return self.runs[key]


def main(argv: list[str]) -> int:
    """Run the command. Return 0 if no layout differs, 1 if one does. titan.cli reports a `ConfigError` and an `InputError`."""
    names = ["all", *LAYOUTS, _OWN]
    parser = parser_of("certify")
    options, job = parser.parse_known_args(argv)
    known = known_options(parser)
    has_layout = any(word.startswith("--parallelism.") for word in job)
    chosen = (options.layouts or (_OWN if has_layout else "all")).split(",")
    if unknown := [name for name in chosen if name not in names]:
        message = f'unknown layout "{unknown[0]}"{choose(unknown[0], names)}'
        raise mistake("--layouts", message)
    world = options.world_size or least_world(load_from_argv(job, options=known, warn=False))
    config, layout = load_to_run(job, world_size=world, options=known)
    check_target("--output", options.output, is_folder=True)
    certifier, rows = Certifier(config, layout), []
    layouts = certifier.layouts(None if "all" in chosen else chosen)
    each = starmap(certifier.certify, layouts.items())
    for row in chain([certifier.certify_source()], each):
        rows.append(row)
        if options.json != "-":
            print(f"{row.name:12} {row.mesh:28} {row}", flush=True)
    if all(row.verdict == "refused" for row in rows[1:]):
        raise InputError("no layout was compared, so there is no certificate")
    file = next(word for word in job if not word.startswith("--"))
    path = options.output / f"{Path(file).stem}.certificate"
    certificate = _certificate(certifier, job, rows)
    text = json.dumps(certificate, indent=2, default=str)
    write_text_atomically(Path(f"{path}.json"), text + "\n")
    write_text_atomically(Path(f"{path}.md"), _page(certificate, rows))
    if not put_json(json.loads(text), options.json):
        print(f"wrote {path}.json and {path}.md")
    return int(any(row.verdict in ("differs", "failed") for row in rows))


def least_world(config: JobConfig, *, shards: int = 2) -> int:
    """Return the minimum number of ranks of a job's degrees, with at least `shards` FSDP shards where their number is open."""
    degrees, ep = degrees_of(config), config.parallelism.expert_parallel_degree
    world = prod(map(abs, degrees.values()))
    least = max(shards, -(-ep // (degrees["cp"] * degrees["tp"])))
    return world * least if degrees["dp_shard"] == -1 else world


def _starts(modules: Sequence[Sequence[str]]) -> list[str]:
    """Return the first module of each stage but the first."""
    return [names[0] for names in modules[1:] if names]


def _certificate(
    certifier: Certifier, job: Sequence[str], rows: Sequence[CertifiedLayout]
) -> dict[str, Any]:
    """Return the certificate as data."""
    model = certifier.config.model
    whole, small = asdict(model.sizes), asdict(certifier.small.model.sizes)
    changes = {n: {"job": whole[n], "certified": v} for n, v in small.items() if v != whole[n]}
    names = ("torch", "transformers", "torchao")
    versions = {d.name: d.version for d in distributions() if d.name in names}
    commit = git_state(Path(titan.__file__).parent) or {}
    return {
        "job": list(job),
        "model": f"{model.name} {model.flavor}",
        "layout": asdict(certifier.layout),
        "titan": {"version": titan.__version__, **commit},
        "versions": {"python": platform.python_version(), **versions},
        "sizes": changes,
        "keys": {k: v for k, v in certifier.keys.items() if k != "model.overrides"},
        "rows": [*map(asdict, rows)],
    }


def _page(certificate: Mapping[str, Any], rows: Sequence[CertifiedLayout]) -> str:
    """Return a certificate as Markdown."""
    note = "The first row compares one process with the program that the model comes from."
    if rows[0].verdict == "unknown":
        note = (
            f"Not compared with the program that the model comes from ({rows[0].reason}). The rows compare titan with titan: "
            "a model that titan reads wrongly would be equal in all of them."
        )
    versions = (certificate["titan"] | certificate["versions"]).items()
    sizes = certificate["sizes"].items()
    return f"""# Certificate of {certificate["model"]}

{note}

`titan certify {shlex.join(certificate["job"])}`: titan {", ".join(f"{k} {v}" for k, v in versions)}.

Ten steps on gloo ranks in fp32, compared with one process: the loss and the gradient norm of each step, each gradient of the first
step, each weight after the last.

| layout | mesh | verdict |
|---|---|---|
{"".join(f"| {row.name} | {row.mesh} | {row} |{chr(10)}" for row in rows)}
| size | job | certified |
|---|---|---|
{chr(10).join(f"| {n} | {v['job']} | {v['certified']} |" for n, v in sizes)}
"""


def _mesh(degrees: Degrees) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in degrees.items()) or "one process"
