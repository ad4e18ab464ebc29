"""Recording of jobs: the trainer's own program runs on a fake device, in processes of its own.

    trace_jobs     several programs and ranks in a process, which compiles once for all of them
    trace_job      in this process, which is of no other use afterwards

program.py records one program by one rank.
"""

from __future__ import annotations

import logging
import operator
import os
import pickle
import re
import sysconfig
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import titan
from titan.base.fork_server import die_with_command, fork_server
from titan.base.hardware import fitting_processes
from titan.base.untrusted import InputError
from titan.checks.rules import resolve_layout
from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.sim.record.repeat import CannotRepeat
from titan.sim.record.trace import Trace
from titan.sim.routing import busiest_rank
from titan.sim.section import assumptions

Prepare = Callable[..., None]
"""Function of a module (so that it pickles) that changes torch or the model in a recording process, before the program is built."""


class TraceError(RuntimeError):
    """Failure to trace a job. The message names the operation and its place."""


@dataclass(frozen=True)
class Job:
    """Work of one recording process: some programs, by some ranks, in sequence, so that it compiles once.

    Attributes:
        programs: programs that differ only in their depth.
        world_size: number of ranks.
        ranks: ranks to record. They differ only in their pipeline stage.
        of_host: whether to record the pace of the host in place of kernels (host_meter.py).
        join: makes one trace of a rank's traces of the programs.
        prepare: changes torch or the model first.
        script: records another program in place of titan's: takes the device, and returns the function that builds the program.
        others: jobs that the process records afterwards, in the same world (`world_of`).
    """

    programs: tuple[JobConfig, ...]
    world_size: int
    ranks: tuple[int, ...]
    of_host: bool = False
    join: Callable[[Sequence[Trace]], Trace] = operator.itemgetter(0)
    prepare: Prepare | None = None
    script: Callable[[Any], Callable[[], Any]] | None = None
    others: tuple[Job, ...] = ()

    def __post_init__(self) -> None:
        """Resolve the programs for the device. The step would do so, and programs are recognised by their identity."""
        resolved = tuple(program.on_device("cuda") for program in self.programs)
        object.__setattr__(self, "programs", resolved)


def distinct_ranks(config: JobConfig, layout: Layout) -> list[int]:
    """Return one rank of each pipeline stage: the rank with most work."""
    parallel = config.parallelism
    alike = (
        parallel.splits_from_both_ends or parallel.context_parallel_rotate_method == "ulysses"
    )
    # If the sequence is not balanced, the ranks with its end attend to most of it.
    busiest = 0 if alike else (layout.cp - 1) * layout.tp
    size = layout.world_size // layout.pp  # ranks are numbered stage by stage
    return [stage * size + busiest for stage in range(layout.pp)]


def trace_job(
    job: Job,
    *,
    steps: int = 2,
    replays_programs: bool = True,
    on_backward_error: Callable[[TraceError], None] = lambda _: None,
) -> Iterator[Trace]:
    """Record a job in this process, and yield the traces of its ranks, then of the ranks of its `others`.

    This changes torch for good. Call it once, in a process that has not run a backward pass.

    Args:
        job: the job.
        steps: number of steps to run. The last step becomes the trace's `step`.
        replays_programs: replay compiled programs, in place of running them each time.
        on_backward_error: called at once with an error that may end the process.

    Raises:
        TraceError: An operation cannot be traced.
        CannotRepeat: `join` cannot make one trace of two.
    """
    from titan.sim.record import torch_compat
    from titan.sim.record.fake_world import fake_world, impersonate_rank
    from titan.sim.record.program import job_program, record_program
    from titan.sim.record.tracer import Tracer

    rank = job.ranks[0]
    if job.of_host:
        yield _host_trace(job)
        return
    layout = None if job.script else _layout(job)
    with fake_world(layout, rank=rank, world_size=job.world_size) as (device, mesh):
        tracer = Tracer(mesh, replays_programs=replays_programs)
        tracer.scopes.watch_fsdp()
        scripts = []
        if job.script is None:
            _prepare(job, tracer)
        else:
            if job.prepare is not None:
                job.prepare()
            with torch_compat.unset_fake_temporarily():  # its imports may compute values
                scripts = [job.script(device)]
        reported: dict[
            int, TraceError
        ] = {}  # by id of the error; described where it was raised

        def tell(error: Exception) -> None:
            reported[id(error)] = TraceError(_describe(error, tracer, rank))
            on_backward_error(reported[id(error)])

        tracer.on_compilation = partial(_install_compiler, tracer)
        tracer.on_backward_error = tell

        def recorded(build: Callable[[], Any]) -> Trace:
            record = partial(record_program, build, rank, job.world_size, tracer, steps)
            try:
                return record()
            except Exception as error:
                if tracer.microbatches is not None and tracer.microbatches.failure:
                    return record(repeats=False)
                if isinstance(error, SystemError) and tracer.error is not None:
                    error = tracer.error
                if error is tracer.error and id(error) in reported:
                    raise reported[id(error)] from error
                raise TraceError(_describe(error, tracer, rank)) from error

        for part in (job, *job.others):
            programs = [
                partial(job_program, p, _layout(part), device, mesh) for p in part.programs
            ]
            for rank in part.ranks:
                # Pipeline stages differ, and every rank is moved to another stage in the same process.
                tracer.transfers.begin(impersonate_rank(rank, mesh) if mesh else 0)
                yield part.join([recorded(build) for build in (*scripts, *programs)])


def _host_trace(job: Job) -> Trace:
    """Return a trace without events, with the host's pace in a tiny job."""
    from titan.sim.record.host_meter import count_job

    trace = Trace(job.ranks[0], job.world_size)
    with suppress(Exception):  # kernels that CPUs lack: the pace is not known
        trace.host = count_job(job.programs[0], _layout(job))
    return trace


def _layout(job: Job) -> Layout:
    """Return the layout of a job's programs."""
    return resolve_layout(job.programs[0], job.world_size)


def world_of(job: Job) -> object:
    """Return a key of jobs that one process may record in sequence.

    The key is unique if the job has to be alone.

    A process is warm after its first job, and records the next jobs in a third of the time.
    """
    if (
        job.of_host
        or job.script
        or job.prepare
        or job.programs[0].compile.enable
        or len(job.ranks) > 1
    ):
        return id(job)
    program, layout = job.programs[0], _layout(job)
    # A process assumes one load of the busiest rank, which depends on the batch, too.
    busiest = busiest_rank(program, program.model.sizes, layout)
    simulator, backend = assumptions(program).model_dump_json(), program.model.attention_backend
    return (str(layout), job.ranks, simulator, busiest, backend) if layout.pp == 1 else id(job)


def _prepare(job: Job, tracer: Any) -> None:
    """Replace the functions that titan's own program finds in its modules."""
    from titan.parallel.block_attention import prefer_backend
    from titan.sim.record import torch_compat
    from titan.sim.record.device import NAME
    from titan.sim.record.experts import assume_token_counts
    from titan.sim.record.microbatches import track_actions
    from titan.sim.record.program import cache_by_program
    from titan.step import train_step as module

    config, layout = job.programs[0], _layout(job)
    # torch's choice between kernels does not distinguish versions of FlashAttention.
    prefer_backend(re.sub(r"fa\d", "flash", config.model.attention_backend), NAME)
    module.initialize = lambda *_, **__: None  # drawing weights leaves nothing behind
    assume_token_counts(busiest_rank(config, config.model.sizes, layout), tracer.record)
    module.build_sparse_mesh = tracer.transfers.with_names(module.build_sparse_mesh)
    if layout.pp > 1:
        track_actions(tracer)
        torch_compat.fix_pipeline_shapes()
        torch_compat.release_sent_outputs()
        # Each rank takes copies of its stages out of it.
        module.build_whole_model = cache_by_program(job.programs, module.build_whole_model)
    if job.prepare is not None:
        job.prepare(config, layout)


def _install_compiler(tracer: Any) -> None:
    """Install the compiler's backend when the first compilation begins."""
    tracer.on_compilation = lambda: None
    # Not earlier: importing Inductor would cost seconds for nothing.
    from titan.sim.record import compiled

    compiled.install(tracer)


_LIBRARIES = ("/site-packages/", sysconfig.get_path("stdlib"), str(Path(titan.__file__).parent))
# Exceptions of FakeTensorMode for shapes and values that depend on data.
_NEEDS_DATA = ("DynamicOutputShapeException", "DataDependentOutputException")
_NO_DATA = (
    "it depends on data, which a simulation does not have: use a fixed shape there, or an assumed one for "
    'fake tensors (docs/simulator.md, "Shapes that depend on data")'
)


def _describe(error: Exception, tracer: Any, rank: int) -> str:
    """Return a line with the operation, phase, action and module of an error, and the function that raised it."""
    if isinstance(error, InputError):  # the user's mistake, and its message says where
        return str(error)
    while type(error) is RuntimeError and isinstance(cause := error.__cause__, Exception):
        error = cause  # a pipeline's stage hides it behind the shapes of its arguments
    scopes = tracer.scopes
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    module = scopes.module_that_raised(error)
    where = [scopes.current().phase, scopes.action, module and f"module {module}"]
    # Where torch failed, and the line of the user's own that led there.
    own = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)][-1:]
    where += [
        f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} in {frame.name}"
        for frame in [last, *(f for f in own if f is not last)]
    ]
    after = f" after {tracer.running}" if tracer.running is not None else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # torch begins with "backend='inductor' raised:". The next line is the error itself.
    message = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
    line = (
        f"rank {rank} cannot be traced{after} ({', '.join(filter(None, where))}): "
        f"{type(error).__name__}: {message}"
    )
    return f"{line}; {_NO_DATA}" if type(error).__name__ in _NEEDS_DATA else line


# ---- children ----------------------------------------------------------------------------------


def trace_jobs(
    jobs: Sequence[Job], processes: int, *, shared: bool = False, **options: Any
) -> Iterator[tuple[int, list[Trace] | Exception]]:
    """Record jobs in processes.

    Yield the number of each job, with its ranks' traces or an exception.

    An exception is a TraceError, or comes from a job's `join`.

    Args:
        jobs: jobs to record.
        processes: number of processes that run at once.
        shared: jobs of one world may share a process. If not, each job has its own.
        options: options of `trace_job`.
    """
    # Children are forked from a server that has imported torch, without threads and without an earlier backward pass.
    # Children end without cleaning up. Python's tracker of semaphores would warn the user about that.
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), quiet])
    )
    preload = ["titan.sim.record.preload"]
    if any(program.compile.enable for job in jobs for program in job.programs):
        preload += ["titan.sim.record.compiled"]
    context = fork_server(preload)
    processes = int(min(processes, max(1, fitting_processes())))
    waiting = [[*group] for group in _groups(jobs, processes if shared else len(jobs))]
    # For each process: the numbers of its open jobs, the process, and the first job's answers by rank.
    running: dict[Connection, tuple[list[int], Any, dict[int, Trace | Exception]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                first, *rest = numbers = waiting.pop(0)
                job = replace(jobs[first], others=tuple(jobs[number] for number in rest))
                ours, theirs = context.Pipe(duplex=False)
                child = context.Process(
                    target=trace_child, args=(theirs, job, options), daemon=True
                )
                child.start()
                # Only the child may hold its end, so that its death ends the connection.
                theirs.close()
                running[ours] = (numbers, child, {})
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                numbers, child, answers = running[connection]
                with suppress(EOFError):
                    left, rank, answer = pickle.loads(connection.recv_bytes())
                    if left < len(numbers):  # the job before is done
                        number = numbers.pop(0)
                        yield number, _outcome(jobs[number], {**answers}, 0)
                        answers.clear()
                    # The last one counts: an error in a backward pass may be caught, or the process's last.
                    answers[rank] = answer
                    continue
                del running[connection]
                connection.close()
                child.join()
                number, *rest = numbers
                yield number, _outcome(jobs[number], answers, child.exitcode)
                if rest:  # it ended with an error, so they need another one
                    waiting.insert(0, rest)
    finally:
        for connection, (_, child, _) in running.items():
            connection.close()
            child.kill()
            child.join()


def _groups(jobs: Sequence[Job], processes: int) -> Iterator[Sequence[int]]:
    """Yield groups of jobs that share a process.

    Jobs of one group have one world. A group is not so large that other processes idle.
    """
    worlds: defaultdict[object, list[int]] = defaultdict(list)
    most = -(-len(jobs) // max(1, processes))
    for number, job in enumerate(jobs):
        worlds[world_of(job) if most > 1 else number].append(number)
    for numbers in worlds.values():
        yield from (numbers[first : first + most] for first in range(0, len(numbers), most))


def _outcome(
    job: Job, answers: dict[int, Trace | Exception], exit_code: int
) -> list[Trace] | Exception:
    """Return a job's traces, or its first error."""
    traces = []
    for rank in job.ranks:
        answer = answers.get(rank)
        if not isinstance(answer, Trace):
            return answer or TraceError(f"the recording process died (exit code {exit_code})")
        traces.append(answer)
    return traces


def trace_child(connection: Connection, job: Job, options: dict[str, Any]) -> None:
    """Record a job in a child process, and send the traces."""
    die_with_command()
    # torch's warnings are about a run, not a recording, and its errors come with an exception, which is sent.
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    parts = (job, *job.others)
    places = [(len(parts) - n, rank) for n, part in enumerate(parts) for rank in part.ranks]

    def send(answer: Trace | Exception) -> None:
        data = (*places[0], answer)  # how many jobs are left, and the rank
        connection.send_bytes(pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL))

    try:
        for trace in trace_job(job, on_backward_error=send, **options):
            send(trace)
            del places[:1]
    except (TraceError, CannotRepeat) as error:
        send(error)
    except InputError as error:
        send(TraceError(str(error)))
    except BaseException as error:
        send(TraceError(f"{type(error).__name__}: {error}"))
    # Skip the interpreter's own exit, which autograd's thread for the fake device sometimes aborts.
    os._exit(0)
