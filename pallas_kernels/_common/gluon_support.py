"""Calling Gluon kernels from JAX: compiled here, launched by the same call of jaxlib as Triton's.

jax-triton takes Gluon kernels too, but 0.4.1 sends them through Triton's optimiser, which is made
for kernels that do not wait by themselves: it turns "wait for all but the last group of copies"
into "wait for all", and a pipelined loop then runs at less than half its speed. And it launches the
warps that were asked for, not those that a warp-specialised kernel adds.
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

TYPE_NAMES = {"bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "bool": "*i1"}
CALL_TARGET = "triton_kernel_call_ffi"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["block"])
@dataclasses.dataclass(frozen=True)
class Described:
    """A row-major matrix handed over as a TMA descriptor of blocks `block`, 128 bytes a row.

    The copy engine reads a block at a time into shared memory, swizzled for wgmma, and zeros
    outside the matrix.
    """

    array: Any  # a JAX array; JAX also builds it of other leaves
    block: tuple[int, int]


def described_type(dtype: str, block: tuple[int, int]) -> str:
    """A descriptor's type as Triton spells it."""
    from triton.experimental.gluon import language as gl

    element = {"bfloat16": gl.bfloat16, "float16": gl.float16}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    return f"tensordesc<{TYPE_NAMES[dtype][1:]}[{block[0]},{block[1]}],{layout!r}>"


def call(
    kernel: Any,
    arrays: Sequence[jax.Array | Described],
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

    types = [_type(a) for a in arrays] + ["i32"] * len(scalars) + [_type(o) for o in out]
    compiled, descriptors = _compiled(
        kernel, tuple(types), tuple(constants.items()), num_warps, capability
    )
    pointer, scalar = gpu_triton.create_array_parameter(0, 16), gpu_triton.create_scalar_parameter
    parameters: list[Any] = []
    waiting = iter(descriptors)
    for a in arrays:
        if isinstance(a, Described):
            parameters += _descriptor_parameters(a, next(waiting))
        else:
            parameters.append(pointer)
    parameters += [scalar(s, "i32") for s in scalars] + [pointer] * len(out)
    run = gpu_triton.TritonKernelCall(compiled, grid, 1, 1, parameters)
    opaque = zlib.compress(run.to_proto(kernel.__name__, b""))
    operands = [a.array if isinstance(a, Described) else a for a in arrays]
    return list(jax.ffi.ffi_call(CALL_TARGET, list(out))(*operands, opaque=opaque))


def _type(argument: jax.Array | jax.ShapeDtypeStruct | Described) -> str:
    if isinstance(argument, Described):
        return described_type(argument.array.dtype.name, argument.block)
    return TYPE_NAMES[argument.dtype.name]


def _descriptor_parameters(described: Described, facts: Mapping[str, Any]) -> list[Any]:
    """The descriptor, then the shape and strides that the kernel could ask it for."""
    from jaxlib import gpu_triton
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    rows, columns = described.array.shape
    descriptor = gpu_triton.create_tma_descriptor_parameter(
        elem_type=TMA_DTYPE_DEVICE_TO_HOST[facts["elem_type"]],
        swizzle=facts["swizzle"],
        shape=(rows, columns),
        strides=(columns, 1),
        block_shape=facts["block_size"],
        oob_fill=0,
    )
    scalar = gpu_triton.create_scalar_parameter
    sizes = [scalar(rows, "i32"), scalar(columns, "i32")]
    return [descriptor, *sizes, scalar(columns, "i64"), scalar(1, "i64")]


@functools.cache
def _compiled(
    kernel: Any,
    types: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    num_warps: int,
    capability: str,
) -> tuple[Any, list[dict[str, Any]]]:
    """The kernel compiled to PTX as jaxlib launches it, and what its descriptors must be."""
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
    compiled = gpu_triton.TritonKernel(
        facts["name"], facts["num_warps"], 1, facts["shared"], ptx, text, arch
    )
    return compiled, facts["tensordesc_meta"]
