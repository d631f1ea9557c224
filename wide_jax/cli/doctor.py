"""`wide doctor`: what is installed, which device runs, which kernels can, and why not."""

import dataclasses
import importlib.metadata
import os
import platform as host
import shutil
from collections.abc import Callable
from typing import Annotated, Literal

import tyro
from rich.console import Console

from pallas_kernels._common.device import Device
from wide_jax.cli.start import Platform
from wide_jax.hf.cache import cache_dir
from wide_jax.hf.embedded import EMBEDDED_MODEL

Level = Literal["ok", "note", "fault"]
MARKS = {
    "ok": "[green]ok[/green]   ",
    "note": "[yellow]note[/yellow] ",
    "fault": "[red]fault[/red]",
}

# Packages whose versions decide what works, and what each is for.
PACKAGES = {
    "jax": "everything",
    "jaxlib": "everything",
    "flax": "the model",
    "optax": "training",
    "orbax-checkpoint": "training checkpoints",
    "transformers": "tokenizers",
    "triton": "GPU kernels (the gpu extra)",
    "jax-triton": "GPU kernels (the gpu extra)",
    "jax-cuda13-plugin": "NVIDIA GPUs (the gpu extra)",
    "jax-cuda13-pjrt": "NVIDIA GPUs (the gpu extra)",
}
OPTIONAL = {"triton", "jax-triton", "jax-cuda13-plugin", "jax-cuda13-pjrt"}


@dataclasses.dataclass(frozen=True)
class Args:
    """Check the installation: a line each, `fault` where something cannot work.

    Exits with 1 if there is a fault, for one if --platform gpu was asked for and no GPU is usable.
    """

    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """What must be usable; `gpu` makes a missing GPU a fault."""
    model: str | None = None
    """Also say what each operation of this model's layers runs."""
    tokens: int = 4096
    """Length of that model's prompt and context."""
    batch: int = 1
    """Sequences in its batch."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    subject: str
    text: str


class Faulty(RuntimeError):
    """The installation has faults; they were printed."""


def main(args: Args) -> None:
    """Print every finding; raises Faulty if one is a fault."""
    console = Console()
    findings = [
        *versions(installed_version),
        plugin_agreement(installed_version),
        *devices(args.platform),
        *kernels(),
        *caches(),
    ]
    if args.model is not None:
        findings += model_plan(args.model, batch=args.batch, tokens=args.tokens)
    for finding in findings:
        line = f"{MARKS[finding.level]} {finding.subject}: {finding.text}"
        console.print(line, highlight=False, soft_wrap=True)
    faults = [finding.subject for finding in findings if finding.level == "fault"]
    if faults:
        raise Faulty(f"{len(faults)} fault(s): {', '.join(faults)}")


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(version_of: Callable[[str], str | None]) -> list[Finding]:
    """Python's version and every package's."""
    found = [Finding("ok", "python", f"{host.python_version()} on {host.platform()}")]
    for package, purpose in PACKAGES.items():
        version = version_of(package)
        if version is not None:
            found.append(Finding("ok", package, version))
        elif package in OPTIONAL:
            found.append(Finding("note", package, f"not installed; needed for {purpose}"))
        else:
            found.append(Finding("fault", package, f"not installed; needed for {purpose}"))
    return found


def plugin_agreement(version_of: Callable[[str], str | None]) -> Finding:
    """Whether jax, jaxlib and the CUDA plugin's two packages are of one release."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    found = {name: version for name in names if (version := version_of(name)) is not None}
    # A fourth number is a release that fixes packaging only.
    releases = {tuple(version.split(".")[:3]) for version in found.values()}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(releases) <= 1:
        return Finding("ok", "jax and plugin", f"agree ({listed})")
    return Finding(
        "fault",
        "jax and plugin",
        f"disagree ({listed}): install them together, pip install 'wide-jax[gpu]'",
    )


def devices(platform: Platform) -> list[Finding]:
    """The devices JAX sees; starts JAX."""
    import jax

    try:
        found = jax.devices(None if platform == "auto" else platform)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return [Finding("fault", f"{platform} devices", f"none usable: {reason}")]
    kinds = sorted({f"{device.platform} {device.device_kind}" for device in found})
    findings = [Finding("ok", "devices", f"{len(found)} x {', '.join(kinds)}")]
    if found[0].platform == "cpu" and platform == "auto" and shutil.which("nvidia-smi"):
        text = "an NVIDIA driver is here but JAX sees no GPU: pip install 'wide-jax[gpu]'"
        findings.append(Finding("note", "GPU", text))
    return findings


def kernels() -> list[Finding]:
    """What each pruned operation runs here, and why, at a typical prefill and decode size."""
    from pallas_kernels import explain

    findings = []
    for phase, tokens in (("prefill", 16_384), ("decode", 1)):
        for op, n in (("gemm_mn", 4096), ("swiglu_up", 14_336)):
            choice = explain(op, m=tokens, n=n, k=4096, group=128)
            trust = "measured" if choice.measured else "not measured on this device"
            text = f"{choice.implementation} ({choice.reason}; {trust})"
            findings.append(Finding("ok", f"{op}, {phase}", text))
    return findings


def model_plan(
    model: str, *, batch: int, tokens: int, device: Device | None = None
) -> list[Finding]:
    """What each operation of a model's layers runs in a prefill and in a decode step, and why.

    `device`: by default this one.
    """
    import jax.numpy as jnp

    from wide_jax.engine import automatic_kernels, plan
    from wide_jax.hf.pretrained import sparsity_hints
    from wide_jax.hf.resolve import resolve_model
    from wide_jax.hf.wide_folder import read_sizes

    folder = resolve_model(model)
    config, wide = read_sizes(folder)
    engine = automatic_kernels(hints=sparsity_hints(folder), device=device)
    findings = [Finding("ok", model, engine.reason)]
    if engine.kernels is None:
        return findings
    dtype = jnp.dtype(config.dtype).name
    for phase, new in (("prefill", tokens), ("decode", 1)):
        for op in plan(
            config,
            wide,
            engine.kernels,
            batch=batch,
            tokens=new,
            context=tokens,
            dtype=dtype,
            device=device,
        ):
            trust = "measured" if op.measured else "not measured on this device"
            text = f"{op.implementation} ({op.reason}; {trust})"
            findings.append(Finding("ok", f"{phase}, {op.part} ({op.op})", text))
    return findings


def caches() -> list[Finding]:
    """The folders that are written to, and whether they can be."""
    folder = cache_dir()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(nearest, os.W_OK)
    free = shutil.disk_usage(nearest).free / 1e9
    text = f"{folder} ({free:.0f} GB free)" if writable else f"{folder} cannot be written"
    model = folder / "models" / EMBEDDED_MODEL.key
    have = "there" if model.exists() else "not fetched yet (wide demo fetches it)"
    return [
        Finding("ok" if writable else "note", "cache", text),
        Finding("ok", "embedded model", f"{EMBEDDED_MODEL.name}: {have}"),
    ]
