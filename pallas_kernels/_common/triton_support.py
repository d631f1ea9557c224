"""Calling Triton kernels from JAX: an optional extra, loaded on first use.

Every Triton kernel of this package goes through `launch`. On a GPU that is `jax_triton`; under
`_common.testing.interpreted()` it is Triton's NumPy interpreter, so that the kernel bodies
themselves run in tests on a CPU.
"""

import contextvars
import functools
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_kernels._common.device import Device, current_device

# jax-triton and triton versions that are tested together (pinned by the `gpu` extra).
TESTED_PAIR = {"jax-triton": "0.4.1", "triton": "3.7"}

interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


@functools.cache
def available() -> bool:
    """Whether jax-triton and Triton are installed. Imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax_triton", "triton"))


def runs_here() -> bool:
    """Whether Triton kernels can run on the current device."""
    return runs_on(current_device())


def runs_on(device: Device) -> bool:
    """Whether Triton kernels can run on a device, with what is installed."""
    return device.capability is not None and float(device.capability) >= 8.0 and available()


def versions() -> dict[str, str]:
    """Installed versions of jax-triton and triton; "not installed" where missing."""
    found = {}
    for name in TESTED_PAIR:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def load() -> Any:
    """The `jax_triton` module. Raises `NotImplementedError` naming both versions if it fails."""
    try:
        import jax_triton
    except Exception as error:  # any failure inside a third-party import means "cannot run here"
        found = ", ".join(f"{name} {version}" for name, version in versions().items())
        wanted = ", ".join(f"{name} {version}" for name, version in TESTED_PAIR.items())
        raise NotImplementedError(
            f"Triton kernels need a working jax-triton and triton; found {found}; tested with "
            f"{wanted} (install the `gpu` extra): {error}"
        ) from error
    return jax_triton


def require_device(op: str, capability: str | None) -> None:
    """Raise `NotImplementedError` where a Triton kernel cannot run: no CUDA device from 8.0 on."""
    if interpreting.get():
        return
    if capability is None or float(capability) < 8.0:
        raise NotImplementedError(
            f"{op}: the triton implementation needs a CUDA device of compute capability 8.0 or "
            f"later, this one has {capability}; use implementation='reference'"
        )
    load()


def launch(
    kernel: Any,
    arrays: Sequence[jax.Array],
    scalars: Sequence[int],
    out: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: int,
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
    in_place: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Run `kernel(*in_place, *arrays, *scalars, *out, **constants)` over `grid` programs.

    Returns the new values of `in_place` (their buffers are updated, not copied, where XLA owns
    them) followed by the outputs. Under `jax.vmap` the calls run one after another, except those
    that update buffers, which refuse it; the result cannot be differentiated. Both are
    `NotImplementedError`s.
    """
    name = kernel.__name__

    def run(mutable, arrays):
        if interpreting.get():
            from pallas_kernels._common import interpreter

            if kernel.is_gluon():
                raise NotImplementedError(f"{name} is a Gluon kernel, which has no interpreter")
            return interpreter.run(kernel, mutable, arrays, scalars, out, grid, constants)
        jax_triton = load()
        if kernel.is_gluon():
            from pallas_kernels._common import gluon_support

            if mutable:
                raise NotImplementedError(f"{name}: Gluon kernels do not update in place")
            capability = current_device().capability
            return gluon_support.call(
                kernel,
                arrays,
                scalars,
                out,
                grid=grid,
                constants=constants,
                num_warps=num_warps,
                capability=capability or "9.0",
            )
        updated = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in mutable]
        with warnings.catch_warnings():
            # Its successor, `jax.Ref` arguments, has no rule inside `custom_jvp` (jax 0.11.2).
            warnings.filterwarnings("ignore", message="input_output_aliases is deprecated")
            results = jax_triton.triton_call(
                *mutable,
                *arrays,
                *scalars,
                kernel=kernel,
                # Updated buffers last: the call hands the kernel inputs, then outputs from the
                # first on, so an aliased one in front would take another output's parameter.
                out_type=[*out, *updated],
                grid=grid,
                name=name,
                num_warps=num_warps,
                num_stages=num_stages,
                input_output_aliases={i: len(out) + i for i in range(len(mutable))},
                **constants,
            )
        return [*results[len(out) :], *results[: len(out)]]

    call = not_batchable(run, name) if in_place else jax.custom_batching.sequential_vmap(run)
    return not_differentiable(call, name)(list(in_place), list(arrays))


def not_batchable(function: Any, name: str) -> Any:
    """`function`, raising `NotImplementedError` under `jax.vmap`.

    For calls that update buffers: in the loop over a batch XLA hands the call the addresses of
    slices, input and output apart, and then the update is written over the input and lost (seen
    on a card, jax 0.11.2).
    """
    wrapped = jax.custom_batching.custom_vmap(function)

    @wrapped.def_vmap
    def rule(axis_size, in_batched, *arguments):
        raise NotImplementedError(
            f"{name} updates buffers in place and takes no further batch axis: use "
            "implementation='reference' under jax.vmap, or an axis that the operation has"
        )

    return wrapped


def not_differentiable(function: Any, name: str) -> Any:
    """`function`, raising `NotImplementedError` in words when JAX tries to differentiate it."""
    wrapped = jax.custom_jvp(function)

    @wrapped.defjvp
    def rule(primals, tangents):
        raise NotImplementedError(
            f"{name} has no derivative: the compiled kernels are for inference. Differentiate "
            "implementation='reference' instead."
        )

    return wrapped
