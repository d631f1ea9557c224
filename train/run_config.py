"""`CalibrateConfig` and `RecoverConfig`: a frozen dataclass a stage, for CLI, YAML and Python.

`load` builds one from a YAML file and `key=value` overrides, `parse` from a command line that may
name such a file, `dump` writes the resolved one into the run folder.
"""

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from train.config import TrainConfig

Method = Literal["wide", "depth", "layer", "static"]
Packing = Literal["packed", "documents", "padded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig(TrainConfig):
    """Train routers on a frozen model (stage 1); run again, it resumes."""

    model: str | None = None
    """A model folder or hub id; without one, the embedded model."""
    out: Path | None = None
    """The run folder: config, metrics, checkpoints and, at the end, the WIDE model."""

    method: Method = "wide"
    """`wide`: groups. `depth`: one group a module, per-token sublayer skipping. `layer`: one
    decision a layer. `static`: a router that does not see the token (static width)."""
    attn_group_size: int | None = None
    """Query heads per attention group; None: those of one key-value head."""
    ffn_group_size: int = 128
    """Channels per FFN group."""
    router_rank: int = 32
    """Outputs of a router's first linear map."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights and activations; None: the checkpoint's. Routers are float32 always."""

    data: tuple[str, ...] = ()
    """Files (.jsonl, .json, .txt, .parquet, also .gz) or a hub id (`owner/name` or
    `owner/name:configuration`)."""
    split: str = "train"
    """Split of a hub data set."""
    text_field: str = "text"
    """Field of a document's text."""
    evaluation_text_field: str | None = None
    """The same in the held-out files; None: `text_field`."""
    packing: Packing = "packed"
    """`packed`: documents end to end. `documents`: the same, without attention across them.
    `padded`: a document a row, long ones in pieces."""
    cache_dir: Path | None = None
    """Where tokenised data is kept; None: beside other files of this tool."""
    evaluation_data: tuple[str, ...] = ()
    """Held-out files for periodic perplexity with hard masks."""
    evaluation_rows: int = 16
    """Rows of the held-out files that an evaluation scores."""

    threshold_rows: int = 64
    """At the end the routers' output biases are moved until argmax masks skip the target on this
    many training rows; 0 leaves them as trained."""

    log_every: int = 10
    """Updates between lines, JSON lines and TensorBoard events."""
    evaluate_every: int = 500
    """Updates between evaluations on the held-out files."""
    save_every: int = 500
    """What a kill can lose, in updates. A checkpoint is begun every half of it and is complete
    before the next one begins."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    loss_limit: float = 25.0
    """A cross entropy above this many nats stops the run: guessing costs 12 or less."""
    distributed: bool = False
    """Start `jax.distributed` first: one process per host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = "ffn_group_size router_rank evaluation_rows log_every evaluate_every save_every"
        for name in (*names.split(), "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.threshold_rows < 0:
            raise ValueError(f"threshold_rows={self.threshold_rows} must be 0 (off) or more")
        if self.method == "layer" and self.target != "all":
            raise ValueError(
                f"method='layer' skips both modules: target={self.target!r} must be all"
            )
        if self.packing == "documents" and self.attention != "mask":
            raise ValueError(
                f"packing='documents' has several segments a row: attention={self.attention!r} "
                "sees across them; use attention='mask' or another packing"
            )
        if not self.loss_limit > 0:
            raise ValueError(f"loss_limit={self.loss_limit} must be positive")

    @property
    def checkpoint_every(self) -> int:
        """Updates between checkpoints: the newest complete one may be the one before the last."""
        return max(self.save_every // 2, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoverConfig(CalibrateConfig):
    """Train LoRA and routers of a finished calibration (stage 2); run again, it resumes."""

    run: Path | None = None
    """Run folder of stage 1 (or a WIDE model folder)."""
    retarget: bool = False
    """Aim at another budget or sparsity than stage 1 did."""
    learning_rate: float = 2e-4
    """Peak of the schedule."""
    lora_rank: int = 16
    """Of the adapters of every linear map of attention and FFN."""
    lora_alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    lora_dropout: float = 0.1
    """Fraction of an adapter's inputs that training drops."""
    lora_rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank) instead."""


# What may differ between a run and its resumption: none of it changes a number.
FREE = {
    "out", "cache_dir", "log_every", "save_every", "keep_checkpoints", "evaluate_every",
    "evaluation_data", "evaluation_text_field", "evaluation_rows", "loss_limit", "distributed",
    "remat", "logits_chunk", "attention",
    "data_parallel", "fsdp", "tensor_parallel",
}  # fmt: skip

# What stage 2 takes from the stage 1 it goes on from.
INHERITED = ("method", "target", "attn_group_size", "ffn_group_size", "router_rank")


def load[Config: TrainConfig](
    kind: type[Config], file: str | Path | None = None, overrides: Sequence[str] = ()
) -> Config:
    """A config from a YAML file of its fields, then `key=value` overrides (values in YAML).

    Raises:
        ValueError: unknown keys, values of the wrong type, or settings that cannot work.
    """
    import yaml

    values: dict[str, Any] = {}
    if file is not None:
        read = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        if read is not None and not isinstance(read, dict):
            raise ValueError(f"{file} must hold `key: value` lines, not a {type(read).__name__}")
        values.update(read or {})
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r} must be key=value")
        values[key.strip().replace("-", "_")] = yaml.safe_load(value)
    return from_dict(kind, values)


def from_dict[Config: TrainConfig](kind: type[Config], values: Mapping[str, Any]) -> Config:
    """A config from plain YAML or JSON values, each brought to its field's type."""
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{kind.__name__} has no settings {unknown}; it has {', '.join(known)}")
    return kind(**{name: _as_type(value, hints[name], name) for name, value in values.items()})


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain YAML and JSON values: paths as text, tuples as lists."""
    plain = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, Path):
            value = str(value)
        plain[name] = list(value) if isinstance(value, tuple) else value
    return plain


def dump(config: TrainConfig, file: Path) -> None:
    """Write the resolved config, every field of it."""
    import yaml

    file.write_text(yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")


def parse[Config: TrainConfig](kind: type[Config], argv: Sequence[str], *, prog: str) -> Config:
    """A config from a command line: `[--config FILE] [key=value ...] [--option value ...]`.

    Options win over `key=value`, which wins over the file, in whatever order they come.
    """
    import tyro

    names = {field.name for field in dataclasses.fields(kind)}
    rest, overrides, file = [], [], None
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config" or argument.startswith("--config="):
            file = argument.partition("=")[2] or next(arguments, None)
            if file is None:
                raise ValueError("--config needs a file")
        elif argument.partition("=")[1] and argument.partition("=")[0] in names:
            overrides.append(argument)
        else:
            rest.append(argument)
    default = load(kind, file, overrides)
    return tyro.cli(kind, args=rest, prog=prog, default=default, description=_described(kind))


def _described(kind: type) -> str:
    """The help's first lines; options of the parser's own are not in the list below them."""
    return (
        f"{kind.__doc__}\n\nSettings can also come from a YAML file of them (--config FILE; a "
        "run's own is its config.yaml) and as key=value (updates=500 data=[a.jsonl,b.jsonl]). "
        "Options win over key=value, which wins over the file."
    )


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], *, without: Collection[str] = ()
) -> list[str]:
    """Settings that decide a run's numbers and differ, as `name: one, not other`."""
    names = sorted((set(one) | set(other)) - FREE - set(without))
    return [
        f"{name}: {one.get(name)!r}, not {other.get(name)!r}"
        for name in names
        if one.get(name) != other.get(name)
    ]


def _as_type(value: Any, hint: Any, name: str) -> Any:
    """`value` as the annotated type; raises ValueError where it is of another."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        (hint,) = [option for option in options if option is not type(None)]
        return _as_type(value, hint, name)
    if origin is Literal:
        # YAML reads `off` as False.
        value = {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value
        if value in options:
            return value
        raise ValueError(f"{name}={value!r} must be one of {options}")
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple):
            return tuple(_as_type(item, options[0], name) for item in items)
    elif hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 2e-3 as text
        except (TypeError, ValueError):
            pass
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{name}={value!r} must be of type {getattr(hint, '__name__', hint)}")
