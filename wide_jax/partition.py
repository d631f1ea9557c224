"""The mesh, and where every array lives on it: all sharding declarations of the project.

The mesh has three axes. `data` and `fsdp` both split the batch; `fsdp` also splits every large
weight (gathered layer by layer when it is used), `tensor` splits heads, channels and vocabulary.
`Partition` spells one `PartitionSpec` per kind of array; weights are found by their Hugging Face
names. Nothing here touches a device until `make_mesh` is called, and without a mesh
(`jax.set_mesh`) the constraints inside the model do nothing.
"""
# ruff: noqa: RUF009 - a PartitionSpec is immutable: a shared default is safe

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wide_jax.config import ModelConfig, WideConfig

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Partition:
    """One spec per kind of array; the letters after `_` are its dimensions, in order.

    `V` vocabulary, `D` hidden, `H` query heads x d, `K` key-value heads x d, `F` intermediate,
    `R` router rank, `G` groups, `r` LoRA rank, `d` head size, `B` batch, `T` tokens, `N` heads.
    """

    # weights, [out, in] as stored
    embed_VD: P = P("tensor", "fsdp")
    head_VD: P = P("tensor", "fsdp")
    gathered_VD: P = P("tensor", None)  # the head while a loop over tokens reads it
    q_HD: P = P("tensor", "fsdp")
    kv_KD: P = P("tensor", "fsdp")
    o_DH: P = P("fsdp", "tensor")
    up_FD: P = P("tensor", "fsdp")
    down_DF: P = P("fsdp", "tensor")
    q_bias_H: P = P("tensor")
    kv_bias_K: P = P("tensor")
    up_bias_F: P = P("tensor")
    residual_D: P = P()  # norms, o_proj and down_proj biases
    head_norm_d: P = P()
    # routers: small and read in float32 by every device
    compressor_RD: P = P()
    compressor_bias_R: P = P()
    router_GR: P = P()
    router_bias_G: P = P()
    # LoRA factors: split as the base weight's axis they touch
    lora_A_column_rD: P = P(None, "fsdp")
    lora_B_column_Hr: P = P("tensor", None)
    lora_A_row_rH: P = P(None, "tensor")
    lora_B_row_Dr: P = P("fsdp", None)
    # batch and activations
    tokens_BT: P = P(BATCH, None)
    micro_ABT: P = P(None, BATCH, None)  # the batch as accumulation steps see it
    hidden_BTD: P = P(BATCH, None, None)
    heads_BTNd: P = P(BATCH, None, "tensor", None)
    inner_BTF: P = P(BATCH, None, "tensor")
    mask_BTG: P = P(BATCH, None, "tensor")
    logits_BTV: P = P(BATCH, None, "tensor")
    scalar: P = P()


PARTITION = Partition()

_COLUMN = r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)"
_ROW = r"\.(o_proj|down_proj)"
# Hugging Face name (the end of it) -> field of `Partition`
_PARAMETERS = (
    (r"embed_tokens\.weight", "embed_VD"),
    (r"lm_head\.weight", "head_VD"),
    (r"\.q_proj\.weight", "q_HD"),
    (r"\.(k_proj|v_proj)\.weight", "kv_KD"),
    (r"\.o_proj\.weight", "o_DH"),
    (r"\.(gate_proj|up_proj)\.weight", "up_FD"),
    (r"\.down_proj\.weight", "down_DF"),
    (r"\.q_proj\.bias", "q_bias_H"),
    (r"\.(k_proj|v_proj)\.bias", "kv_bias_K"),
    (r"\.(gate_proj|up_proj)\.bias", "up_bias_F"),
    (r"\.(o_proj|down_proj)\.bias", "residual_D"),
    (r"\.(q_norm|k_norm)\.weight", "head_norm_d"),
    (r"norm\.weight", "residual_D"),
    (r"\.compressor\.weight", "compressor_RD"),
    (r"\.compressor\.bias", "compressor_bias_R"),
    (r"\.router\.weight", "router_GR"),
    (r"\.router\.bias", "router_bias_G"),
    (_COLUMN + r"\.(lora\.)?lora_A(\.weight)?", "lora_A_column_rD"),
    (_COLUMN + r"\.(lora\.)?lora_B(\.weight)?", "lora_B_column_Hr"),
    (_ROW + r"\.(lora\.)?lora_A(\.weight)?", "lora_A_row_rH"),
    (_ROW + r"\.(lora\.)?lora_B(\.weight)?", "lora_B_row_Dr"),
)


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of `data x fsdp x tensor` devices, the first ones of `devices` (default: all).

    Raises:
        ValueError: an axis below 1, or more devices asked for than there are.
    """
    sizes = (data, fsdp, tensor)
    if min(sizes) < 1:
        raise ValueError(f"mesh {data=} {fsdp=} {tensor=}: every axis must be at least 1")
    devices = jax.devices() if devices is None else list(devices)
    wanted = math.prod(sizes)
    if wanted > len(devices):
        raise ValueError(
            f"mesh {data=} x {fsdp=} x {tensor=} needs {wanted} devices and there are "
            f"{len(devices)}: make an axis smaller"
        )
    return jax.make_mesh(sizes, AXES, devices=devices[:wanted], axis_types=(AxisType.Auto,) * 3)


def spec_for(name: str) -> P:
    """The declared spec of a parameter, by its Hugging Face name.

    Raises:
        KeyError: no declaration matches the name.
    """
    for pattern, field in _PARAMETERS:
        if re.search(pattern + "$", name):
            return getattr(PARTITION, field)
    raise KeyError(f"no sharding is declared for parameter {name!r}: add it to {__name__}")


def sharding_for(name: str, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Where a parameter of this name and shape lives on `mesh`.

    Raises:
        KeyError: no declaration matches the name.
        ValueError: a dimension that its mesh axis does not divide.
    """
    spec = spec_for(name)
    for axis, names in enumerate(spec):
        parts = axis_size(mesh, names)
        if shape[axis] % parts:
            raise ValueError(
                f"{name}: dimension {axis} of shape {tuple(shape)} must be a multiple of {parts}, "
                f"the size of mesh axis {names!r}"
            )
    return NamedSharding(mesh, spec)


def shardings_for(arrays: Mapping[str, jax.Array], mesh: Mesh) -> dict[str, NamedSharding]:
    """`sharding_for` of every named array."""
    return {name: sharding_for(name, array.shape, mesh) for name, array in arrays.items()}


def axis_size(mesh: Mesh | AbstractMesh, names: str | Sequence[str] | None) -> int:
    """Devices along one entry of a spec: 1 for None, a product for several axes."""
    if names is None:
        return 1
    names = (names,) if isinstance(names, str) else names
    return math.prod(mesh.shape[name] for name in names)


def check_mesh(mesh: Mesh, config: ModelConfig, wide: WideConfig | None = None) -> None:
    """Refuse a mesh that this model cannot be split over, with every reason at once.

    Router groups must align with tensor shards: each shard holds whole groups, or each group
    covers whole shards (as depth routing's one group does).

    Raises:
        ValueError: which sizes the mesh does not divide.
    """
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    problems = []
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % tensor:
            problems.append(f"{name}={getattr(config, name)} is not a multiple of {tensor=}")
    if config.hidden_size % fsdp:
        problems.append(f"hidden_size={config.hidden_size} is not a multiple of {fsdp=}")
    if wide is not None:
        groups = {"attention": wide.attn_groups(config), "FFN": wide.ffn_groups(config)}
        for module, count in groups.items():
            if count % tensor and tensor % count:
                problems.append(
                    f"{count} {module} groups a layer do not align with {tensor=} shards "
                    "(one must divide the other)"
                )
    if problems:
        raise ValueError("this model does not fit the mesh: " + "; ".join(problems))


def constrain(x: jax.Array, kind: str) -> jax.Array:
    """Pin an activation to its declared sharding, `kind` naming a field of `Partition`.

    No effect without a mesh of this module's axes. A mesh axis that does not divide its dimension
    is left out: a mask of one group is the same on every tensor shard.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return x
    spec = getattr(PARTITION, kind)
    fitting = [
        names if size % axis_size(mesh, names) == 0 else None
        for size, names in zip(x.shape, (*spec, *[None] * (x.ndim - len(spec))), strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, P(*fitting))
