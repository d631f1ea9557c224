"""Every parameter has a declared place, meshes that do not fit are refused with the numbers."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from wide_jax import lora, partition
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.model import WideForCausalLM
from wide_jax.params import DropoutKey

CONFIG = ModelConfig(
    "qwen", 64, 32, 48, 1, 8, 4, 8, 64, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True
)


def test_every_parameter_of_the_largest_model_has_a_spec_of_its_rank():
    wide = WideConfig.for_model(CONFIG, ffn_group_size=16, router_rank=4)
    model = WideForCausalLM(CONFIG, wide, rngs=nnx.Rngs(0))
    lora.attach(model, lora.LoRASettings(rank=2), rngs=nnx.Rngs(0))
    names = {
        ".".join(map(str, path)): variable.shape
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(DropoutKey)))
    }
    assert len(names) > 40
    for name, shape in names.items():
        assert len(partition.spec_for(name)) <= len(shape), name
    # A spec in the wrong axis order would pass that: [out, in] by hand.
    layer = "model.layers.0."
    assert partition.spec_for(layer + "self_attn.q_proj.weight") == P("tensor", "fsdp")
    assert partition.spec_for(layer + "self_attn.o_proj.weight") == P("fsdp", "tensor")
    assert partition.spec_for(layer + "mlp.down_proj.weight") == P("fsdp", "tensor")
    assert partition.spec_for(layer + "mlp.up_proj.lora.lora_B") == P("tensor", None)
    assert partition.spec_for(layer + "mlp.down_proj.lora_A.weight") == P(None, "tensor")
    assert partition.spec_for("model.embed_tokens.weight") == P("tensor", "fsdp")
    assert partition.spec_for(layer + "post_attention_layernorm.weight") == P()


def test_an_undeclared_parameter_is_refused_by_name():
    with pytest.raises(KeyError, match=r"declared for parameter 'model\.rotary\.x'"):
        partition.spec_for("model.rotary.x")


def test_shapes_that_an_axis_does_not_divide_are_refused_with_the_numbers():
    mesh = partition.make_mesh(1, 2, 4)
    with pytest.raises(
        ValueError, match=r"dimension 0 of shape \(66, 32\) must be a multiple of 4"
    ):
        partition.sharding_for("lm_head.weight", (66, 32), mesh)
    sharding = partition.sharding_for("lm_head.weight", (64, 32), mesh)
    assert sharding.shard_shape((64, 32)) == (16, 16)


def test_meshes_larger_than_the_machine_or_below_one_are_refused():
    assert partition.make_mesh(2, 2, 2).size == 8
    with pytest.raises(ValueError, match="needs 16 devices and there are 8"):
        partition.make_mesh(2, 2, 4)
    with pytest.raises(ValueError, match="every axis must be at least 1"):
        partition.make_mesh(0)


def test_router_groups_align_with_tensor_shards_or_are_refused():
    mesh = partition.make_mesh(1, 1, 4)
    partition.check_mesh(mesh, CONFIG, WideConfig(2, 12))  # 4 and 4 groups: one a shard
    partition.check_mesh(mesh, CONFIG, WideConfig(4, 24))  # 2 and 2: each covers two shards
    partition.check_mesh(mesh, CONFIG, WideConfig.depth_routing(CONFIG))
    with pytest.raises(ValueError, match="3 FFN groups a layer do not align with tensor=4"):
        partition.check_mesh(mesh, CONFIG, WideConfig(2, 16))
    with pytest.raises(ValueError, match="num_key_value_heads=4 is not a multiple of tensor=8"):
        partition.check_mesh(partition.make_mesh(1, 1, 8), CONFIG)


def test_constraints_act_under_a_mesh_and_do_nothing_without():
    x = jnp.ones((4, 2, 32))
    constrain = jax.jit(lambda x: partition.constrain(2 * x, "inner_BTF"))
    assert constrain(x).sharding.is_fully_replicated
    with jax.set_mesh(partition.make_mesh(2, 1, 4)):
        assert constrain(x).sharding.shard_shape(x.shape) == (2, 2, 8)
        # A dimension of one (depth routing's only group) stays whole.
        one = jax.jit(lambda m: partition.constrain(2 * m, "mask_BTG"))(x[..., :1])
        assert one.sharding.shard_shape(one.shape) == (2, 2, 1)
