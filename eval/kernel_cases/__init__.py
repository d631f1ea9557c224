"""The problems that kernels are tuned and benchmarked on: one family an op, one file a kind.

A new op is one file here (a `Case`, see base.py) and one line in `FAMILIES`.
"""

from eval.kernel_cases import attention, input_pruned, output_pruned
from eval.kernel_cases.base import Case as Case
from eval.kernel_cases.base import Family as Family
from eval.kernel_cases.base import MaskKind as MaskKind
from eval.kernel_cases.base import ProductCase as ProductCase
from eval.kernel_cases.base import make_mask as make_mask

FAMILIES: dict[str, Family] = {
    "gemm_mn": output_pruned.QUERY,
    "swiglu_up": output_pruned.GATE_UP,
    "gemm_k": input_pruned.DOWN,
    "gemm_k_o": input_pruned.OUTPUT,  # the same op as the output projection of attention
    "attention_prefill": attention.PREFILL,
    "attention_decode": attention.DECODE,
}


def families(ops: tuple[str, ...]) -> dict[str, Family]:
    """The families named, or all for none named. Raises `ValueError` on an unknown op."""
    if unknown := set(ops) - FAMILIES.keys():
        raise ValueError(f"unknown ops {sorted(unknown)}; known: {', '.join(FAMILIES)}")
    return {op: family for op, family in FAMILIES.items() if not ops or op in ops}
