"""Device time of single ops, from the profiler's record of every kernel that ran.

Contenders take turns, call by call, so that clocks and power wander for all of them alike. A
call's time is the sum of the durations of its kernels: no launch gaps, no host. Inputs that would
fit the L2 cache have to be rotated over by the caller (several argument sets).
"""

import collections
import contextvars
import dataclasses
import glob
import itertools
import statistics
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.profiler import ProfileData

WARM_UP = 5  # calls at the beginning of a round that are not counted
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function, found again in a profile by the name of its module."""

    call: Callable[..., Any]
    module: str
    temporary_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of device time of one call: every sample, and their median."""

    samples_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        """Median, milliseconds."""
        return statistics.median(self.samples_ms)


def compile_all[Name: Hashable](
    functions: Mapping[Name, tuple[Callable[..., Any], tuple[Any, ...]]], workers: int = 8
) -> tuple[dict[Name, Compiled], dict[Name, Exception]]:
    """Compile `name -> (function, example arguments)` side by side, and run each once.

    Returns the compiled functions and, for those that do not compile or launch, the error.
    """

    def compile_one(item):
        function, arguments = item
        module = f"contender_{next(_numbers)}"

        def run(*args):
            return function(*args)

        run.__name__ = module
        compiled = jax.jit(run).lower(*arguments).compile()
        jax.block_until_ready(compiled(*arguments))
        memory = compiled.memory_analysis()
        if memory is None:
            raise RuntimeError(f"this backend cannot say what memory {module} needs")
        return Compiled(
            compiled,
            f"jit_{module}",
            memory.temp_size_in_bytes,
            memory.output_size_in_bytes,
        )

    done: dict[Name, Compiled] = {}
    failed: dict[Name, Exception] = {}
    with ThreadPoolExecutor(workers) as pool:
        futures = {
            name: pool.submit(contextvars.copy_context().run, compile_one, item)
            for name, item in functions.items()
        }
        for name, future in futures.items():
            try:
                done[name] = future.result()
            except Exception as error:  # whatever stops a compile or launch is a result here
                failed[name] = error
    return done, failed


def time_interleaved[Name: Hashable](
    contenders: Mapping[Name, tuple[Compiled, Sequence[tuple[Any, ...]]]], rounds: int = 30
) -> dict[Name, Timing]:
    """Time `name -> (compiled, argument sets)` in turns; `rounds` samples each.

    Every call takes the next argument set, whoever makes it: with the sets that its neighbour has
    just read a contender would find some of them in the L2 cache. A round begins with `WARM_UP`
    calls of its last contender that are not counted: the first kernels after a pause run slower
    (by 4 us on an H200, even behind a short one). Raises `RuntimeError` where the profiler saw no
    kernels: there is no other clock here.
    """
    last = list(contenders.values())[-1]
    a_turn = [*itertools.repeat(last, WARM_UP), *contenders.values()]
    number = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                out = None
                for compiled, sets in a_turn:
                    out = compiled.call(*sets[next(number) % len(sets)])
                jax.block_until_ready(out)
        files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        kernels = _kernel_durations(files)
    sharing = collections.defaultdict(list)  # contenders of one compiled function, in call order
    for name, (compiled, _) in contenders.items():
        sharing[compiled.module].append(name)
    timings = {}
    for module, names in sharing.items():
        durations = kernels.get(module, [])
        uncounted = WARM_UP if module == last[0].module else 0
        a_round = uncounted + len(names)
        a_call, left_over = divmod(len(durations), rounds * a_round)
        if a_call == 0 or left_over:
            raise RuntimeError(
                f"the profile has {len(durations)} kernels for {rounds} rounds of {names}"
            )
        calls = [sum(durations[i : i + a_call]) for i in range(0, len(durations), a_call)]
        for j, name in enumerate(names, start=uncounted):
            timings[name] = Timing(tuple(ns * 1e-6 for ns in calls[j::a_round]))
    return timings


@dataclasses.dataclass(frozen=True)
class KernelEvent:
    """One kernel or memory operation that ran on a GPU stream."""

    name: str
    module: str  # the compiled function it belongs to
    start_ns: float
    duration_ns: float


def kernel_events(call: Callable[[], Any]) -> list[KernelEvent]:
    """What ran on the GPU while `call` did, in order of start. `call` must have run before.

    Raises `RuntimeError` where the profiler saw no kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        events = _events(glob.glob(f"{folder}/**/*.xplane.pb", recursive=True))
    if not events:
        raise RuntimeError("the profiler saw no kernels: a breakdown needs a GPU")
    return events


def _events(files: Sequence[str]) -> list[KernelEvent]:
    found = []
    for file in files:
        for plane in ProfileData.from_file(file).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    module = str(dict(event.stats).get("hlo_module"))
                    found.append(KernelEvent(event.name, module, event.start_ns, event.duration_ns))
    return sorted(found, key=lambda event: event.start_ns)


def _kernel_durations(files: Sequence[str]) -> dict[str, list[float]]:
    """Nanoseconds of every kernel and memory operation on a GPU stream, by module, in order."""
    durations: dict[str, list[float]] = collections.defaultdict(list)
    for event in _events(files):
        durations[event.module].append(event.duration_ns)
    return durations
