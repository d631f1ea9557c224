"""The other side of the parity check: torch, transformers and peft on what the project exported.

    python -m tests.parity.compare EXPORTED TABLE.md

Recomputes the golden arrays, compares JAX's numbers with them, loads every exported folder with
plain transformers (and the adapters with peft), and writes a table: model x check x largest
difference. Exits with 1 if any is beyond its bound.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import safetensors
import torch
import transformers

from tests.parity import cases, make_golden

LOGITS = 1e-4  # float32 logits, absolute; they are of order 1 to 10
GOLDEN = 2e-5  # the stored arrays against those of this machine's torch
BFLOAT16 = 1.5  # RMS error against float32, in units of transformers' own bfloat16 error

# check -> (bound, how the table shows it)
CHECKS: dict[str, tuple[float, str]] = {
    "golden again": (GOLDEN, "{:.1e}"),
    "float32 logits": (LOGITS, "{:.1e}"),
    "masked": (LOGITS, "{:.1e}"),
    "routed": (LOGITS, "{:.1e}"),
    "decisions": (0, "{:.0f}"),
    "greedy": (0, "{:.0f}"),
    "bfloat16 RMS ratio": (BFLOAT16, "{:.2f}"),
    "export, tensors": (0, "{:.0f}"),
    "export, dense logits": (0, "{:.0f}"),
    "merged LoRA": (LOGITS, "{:.1e}"),
    "PEFT adapter": (LOGITS, "{:.1e}"),
}


def compare_case(case: str, folder: Path, fresh: dict, stored: dict) -> dict[str, float | None]:
    """The largest difference of every check; None where a check does not apply."""
    jax = dict(np.load(folder / "jax.npz"))
    ids = torch.from_numpy(cases.input_ids(case))
    base = load(folder / "base")
    dense = logits(base, ids)
    found: dict[str, float | None] = {
        "golden again": max(
            gap(as_float(fresh[name]), as_float(stored[name]))
            for name in fresh
            if name != "logits_bfloat16"
        ),
        "float32 logits": max(gap(jax["logits"], fresh["logits"]), gap(jax["logits"], dense)),
        "masked": gap(jax["masked_logits"], fresh["masked_logits"]),
        "routed": gap(jax["routed_logits"], fresh["routed_logits"]),
        "decisions": sum(
            int((jax[name] != fresh[name]).sum()) for name in ("routed_attention", "routed_ffn")
        ),
        "greedy": int((jax["greedy"] != fresh["greedy"]).sum()) if "greedy" in jax else None,
        "bfloat16 RMS ratio": rms(jax["logits_bfloat16"] - fresh["logits"])
        / rms(bfloat16(fresh["logits_bfloat16"]) - fresh["logits"]),
        "export, tensors": sum(
            differing(folder / "base", folder / name) for name in ("wide", "again")
        ),
        "export, dense logits": sum(
            int((logits(load(folder / name), ids) != dense).sum()) for name in ("wide", "again")
        ),
    }
    adapted = logits(peft.PeftModel.from_pretrained(base, folder / "adapter").eval(), ids)
    plain = logits(load(folder / "adapter"), ids)  # with peft installed: base and adapter
    merged = logits(load(folder / "merged"), ids)
    assert gap(adapted, dense) > 0.1, f"{case}: the adapter changes nothing"
    found["merged LoRA"] = max(gap(merged, adapted), gap(merged, jax["merged_logits"]))
    found["PEFT adapter"] = max(
        gap(adapted, jax["adapter_logits"]), gap(plain, jax["adapter_logits"])
    )
    return found


def load(folder: Path):
    """Plain transformers on a folder, every tensor accounted for."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"{folder}: {wrong}"
    return model.eval()


def logits(model, ids: torch.Tensor) -> np.ndarray:
    """Float32 logits `[rows, tokens, vocabulary]`."""
    with torch.no_grad():
        return model(input_ids=ids).logits.numpy()


def differing(one: Path, other: Path) -> int:
    """Elements of the base weights that two folders do not share bit by bit."""
    left, right = stored_weights(one), stored_weights(other)
    if set(left) != set(right):
        return sum(array.size for array in left.values())
    return sum(int((left[name] != right[name]).sum()) for name in left)


def stored_weights(folder: Path) -> dict[str, np.ndarray]:
    """All weights of a folder's `model*.safetensors`."""
    weights = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safetensors.safe_open(path, framework="np") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights


def gap(one: np.ndarray, other: np.ndarray) -> float:
    """The largest absolute difference."""
    return float(np.abs(one - other).max())


def rms(values: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 numbers from their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_float(array: np.ndarray) -> np.ndarray:
    """For differences of any array: bools and token ids too."""
    return array.astype(np.float64)


def main(exported: Path, table: Path) -> int:
    """Run all cases and write the table; returns how many checks are beyond their bounds."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    lines, failed, checked = [], [], 0
    with tempfile.TemporaryDirectory() as scratch:
        make_golden.make_all(Path(scratch))
        for case in cases.CASES:
            fresh = dict(np.load(Path(scratch) / f"{case}.npz"))
            stored = dict(np.load(make_golden.GOLDEN / f"{case}.npz"))
            found = compare_case(case, exported / case, fresh, stored)
            cells = []
            for check, (bound, style) in CHECKS.items():
                value = found[check]
                cells.append("-" if value is None else style.format(value))
                checked += value is not None
                if value is not None and not value <= bound:
                    failed.append(f"{case}: {check} = {value}, allowed {bound}")
            lines.append(f"| `{case}` | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        ropes = [dict(np.load(d / "rope.npz")) for d in (Path(scratch), make_golden.GOLDEN)]
        for name in ropes[0]:
            if not np.allclose(ropes[0][name], ropes[1][name], rtol=1e-6, atol=0):
                failed.append(f"rope.npz: {name} differs from the stored one")
    header = ["| model | " + " | ".join(CHECKS) + " |", "|---" * (len(CHECKS) + 1) + "|"]
    versions = [f"{m.__name__} {m.__version__}" for m in (torch, transformers, peft)]
    text = ["", f"## {', '.join(versions)}", "", *header, *lines, ""]
    table.write_text("\n".join(text), encoding="utf-8")
    for line in failed:
        print(f"FAILED {line}")
    print(f"{checked - len(failed)} of {checked} checks within their bounds")
    return len(failed)


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]), Path(sys.argv[2])) else 0)
