"""Calling Gluon kernels from JAX: compiled here, launched by the same call of jaxlib as Triton's.

jax-triton takes Gluon kernels too, but 0.4.1 sends them through Triton's optimiser, which is made
for kernels that do not wait by themselves: it turns "wait for all but the last group of copies"
into "wait for all", and a pipelined loop then runs at less than half its speed. And it launches the
warps that were asked for, not those that a warp-specialised kernel adds.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

TYPE_NAMES = {"bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "bool": "*i1"}
CALL_TARGET = "triton_kernel_call_ffi"


def call(
    kernel: Any,
    arrays: Sequence[jax.Array],
    scalars: Sequence[int],
    out: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: int,
    constants: Mapping[str, Any],
    num_warps: int,
    capability: str,
) -> list[jax.Array]:
    """Run `kernel(*arrays, *scalars, *out, **constants)` over `grid` programs; see
    `triton_support.launch`. Scalars are 32-bit."""
    from jaxlib import gpu_triton

    types = [TYPE_NAMES[a.dtype.name] for a in arrays] + ["i32"] * len(scalars)
    types += [TYPE_NAMES[o.dtype.name] for o in out]
    compiled = _compiled(kernel, tuple(types), tuple(constants.items()), num_warps, capability)
    array, scalar = gpu_triton.create_array_parameter(0, 16), gpu_triton.create_scalar_parameter
    parameters = [array] * len(arrays) + [scalar(s, "i32") for s in scalars] + [array] * len(out)
    run = gpu_triton.TritonKernelCall(compiled, grid, 1, 1, parameters)
    opaque = zlib.compress(run.to_proto(kernel.__name__, b""))
    return list(jax.ffi.ffi_call(CALL_TARGET, list(out))(*arrays, opaque=opaque))


@functools.cache
def _compiled(
    kernel: Any,
    types: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    num_warps: int,
    capability: str,
) -> Any:
    """The kernel compiled to PTX for a compute capability, as jaxlib launches it."""
    import triton
    from jaxlib import gpu_triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    arch = int(capability.replace(".", ""))
    target = GPUTarget("cuda", arch, 32)
    backend: Any = triton.compiler.make_backend(target)
    options = backend.parse_options({"num_warps": num_warps})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    values = dict(constants)
    given = [name for name in kernel.arg_names if name not in values]
    signature = dict(zip(given, types, strict=True)) | dict.fromkeys(values, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    # XLA's buffers start at multiples of 16 bytes.
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in given
        if signature[name].startswith("*")
    }
    source = GluonASTSource(kernel, signature, values, aligned)
    generators, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, generators, modules, context)
    text = str(module)
    facts: dict[str, Any] = {"num_warps": num_warps}
    module = backend.gluon_to_ttgir(module, facts, options, arch)
    llvm = backend.make_llir(module, facts, options, arch)
    ptx = backend.make_ptx(llvm, facts, options, arch)
    return gpu_triton.TritonKernel(
        facts["name"], facts["num_warps"], 1, facts["shared"], ptx, text, arch
    )
