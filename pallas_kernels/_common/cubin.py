"""Compiling a Triton kernel for a card that is not there: machine code and what it uses.

Goes through `triton.compile` with the arguments' alignment that jax-triton promises at a call
(arrays 16 bytes), down to the cubin, and reads registers, spills and shared memory off it with the
`cuobjdump` that Triton carries.
"""

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one thread block of a compiled kernel takes. `spills` are bytes a thread."""

    registers: int
    spills: int
    shared_memory: int
    instructions: frozenset[str]


# Instructions worth knowing about, as they begin in the PTX.
MARKERS = (
    "wgmma.mma_async",
    "mma.sync",
    "cp.async.bulk.tensor",
    "cp.async.cg",
    "cp.async.ca",
    "red.",
    "atom.",
)


def compile_usage(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: str,
    num_warps: int,
    num_stages: int,
) -> Usage:
    """Compile for a compute capability and report. `signature`: parameter -> "*bf16", "i32", ...

    Raises whatever the compiler or assembler raises when the kernel does not compile.
    """
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    attrs = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*")
    }
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, types, dict(constants), attrs)
    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return _usage(triton.compile(source, target=target, options=options))


def compile_ttir_usage(text: str, capability: str, num_warps: int, num_stages: int) -> Usage:
    """The same for Triton IR in text form: what Pallas' Triton lowering hands to XLA.

    XLA's own Triton may differ a little from the installed one that compiles here.
    """
    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.ttir"
        path.write_text(text)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        return _usage(triton.compile(str(path), target=target, options=options))


def _usage(compiled: Any) -> Usage:
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [_cuobjdump(), "-res-usage", str(path)], check=True, capture_output=True, text=True
        )
    usage = text.stdout + text.stderr
    return Usage(
        registers=_figure("REG", usage),
        spills=_figure("STACK", usage),
        shared_memory=compiled.metadata.shared,
        instructions=frozenset(
            marker for marker in MARKERS if re.search(rf"[\s]{re.escape(marker)}", ptx)
        ),
    )


def _figure(name: str, usage: str) -> int:
    found = re.search(rf"{name}:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage names no {name}: {usage}")
    return int(found[1])


def _cuobjdump() -> str:
    return str(pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


TYPE_NAMES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


def tile_signature(dtype: str) -> dict[str, str]:
    """Parameter types of `tile_kernel`."""
    kind = TYPE_NAMES[dtype]
    return dict(x=kind, w=kind, w_up=kind, bias=kind, order="*i32", count="*i32", M="i32", out=kind)


def persistent_signature(dtype: str) -> dict[str, str]:
    """Parameter types of `persistent_kernel`."""
    kind = TYPE_NAMES[dtype]
    lists = dict(order="*i32", count="*i32", mask="*i1")
    return dict(x=kind, w=kind, w_up=kind, bias=kind, **lists, M="i32", out=kind)


def small_signature(dtype: str) -> dict[str, str]:
    """Parameter types of `small_kernel`."""
    kind = TYPE_NAMES[dtype]
    return dict(x=kind, w=kind, w_up=kind, bias=kind, mask="*i1", M="i32", out=kind)


def split_signature(dtype: str) -> dict[str, str]:
    """Parameter types of `split_k_kernel`."""
    kind = TYPE_NAMES[dtype]
    return dict(x=kind, w=kind, w_up=kind, mask="*i1", M="i32", sums="*fp32")
