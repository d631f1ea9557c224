"""Triton kernels on NumPy arrays, for tests: Triton's interpreter behind `jax.pure_callback`.

The interpreter expects torch tensors; `_Storage` and `_Tensor` are the few methods of them it
calls. bfloat16 travels as float32, which holds it exactly (the interpreter's dot product takes
bfloat16's bits for integers), and results are rounded to bfloat16 afterwards.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_one_at_a_time = threading.Lock()  # the interpreter keeps its grid in a global


class _Storage:
    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> "_Storage":
        return self

    def copy_(self, other: "_Storage") -> None:
        if other is not self:
            raise RuntimeError("the interpreter was given memory on the host: nothing to copy")


class _Tensor:
    """A NumPy array as the torch tensor that Triton's interpreter expects."""

    def __init__(self, array: np.ndarray | None):
        self.storage = None if array is None else _Storage(array)
        self.dtype = None if array is None else array.dtype.name

    def _stored(self) -> _Storage:
        if self.storage is None:
            raise RuntimeError("the interpreter read a tensor before it was given memory")
        return self.storage

    def set_(self, storage, offset, size, stride):
        self.storage = storage

    def new_empty(self, size, device):
        tensor = _Tensor(None)
        tensor.dtype = self.dtype
        return tensor

    def untyped_storage(self):
        return self.storage

    def data_ptr(self):
        return self._stored().data_ptr()

    def storage_offset(self):
        return 0

    def size(self):
        return self._stored().array.shape

    def stride(self):
        return self._stored().array.strides


@functools.cache
def _interpreted(function: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function)


@contextlib.contextmanager
def _device_functions_interpreted() -> Iterator[None]:
    """Functions that a kernel calls, Triton's own library among them, are interpreted too.

    Each call's patches of the language are undone: Triton's own interpreter leaves them, and a
    kernel could not be compiled afterwards.
    """
    from triton.runtime.interpreter import _patch_lang
    from triton.runtime.jit import JITFunction

    def interpret(self: Any, *args: Any, **kwargs: Any) -> Any:
        patches = _patch_lang(self.fn)
        try:
            return _interpreted(self.fn).rewrite()(*args, **kwargs)
        finally:
            patches.restore()

    compiled_call = JITFunction.__call__
    JITFunction.__call__ = interpret
    try:
        yield
    finally:
        JITFunction.__call__ = compiled_call


def run(
    kernel: Any,
    mutable: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    scalars: Sequence[int],
    out: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    """See `triton_support.launch`. Outputs are poisoned before the kernel runs."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in mutable] + list(out)

    def callback(mutable, arrays):
        results = [_Guarded(a) for a in mutable] + [_Guarded(poisoned(s)) for s in out]
        inputs = [_Guarded(a) for a in arrays]
        operands = [_Tensor(a.array) for a in [*results[: len(mutable)], *inputs]]
        outputs = [_Tensor(a.array) for a in results[len(mutable) :]]
        with _one_at_a_time, _device_functions_interpreted():
            _interpreted(kernel.fn)[(grid,)](*operands, *scalars, *outputs, **constants)
        for guarded in [*results, *inputs]:
            guarded.check(kernel.__name__)
        return [r.array.astype(s.dtype) for r, s in zip(results, shapes, strict=True)]

    return jax.pure_callback(callback, shapes, list(mutable), list(arrays))


class _Guarded:
    """A copy of an array with poison before and after it, which nobody may read or write."""

    MARGIN = 1024

    def __init__(self, array: Any):
        array = np.asarray(array)
        dtype = np.dtype(np.float32) if array.dtype.name == "bfloat16" else array.dtype
        guard = poisoned(jax.ShapeDtypeStruct((array.size + 2 * self.MARGIN,), dtype))
        self.buffer = guard
        self.expected = guard.copy()
        self.array = guard[self.MARGIN : self.MARGIN + array.size].reshape(array.shape)
        self.array[...] = array

    def check(self, name: str) -> None:
        for end in (slice(None, self.MARGIN), slice(-self.MARGIN, None)):
            if self.buffer[end].tobytes() != self.expected[end].tobytes():
                raise RuntimeError(f"{name} wrote outside an array")


def poisoned(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """An array no kernel would leave behind: NaN, the lowest integer, or True."""
    if shape.dtype == np.bool_:
        return np.ones(shape.shape, shape.dtype)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return np.full(shape.shape, np.iinfo(shape.dtype).min, shape.dtype)
    return np.full(shape.shape, np.nan, shape.dtype)
