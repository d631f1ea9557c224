"""GPU kernels for products and attention that skip (token, group) pairs; usable on their own.

    normed, mask = norm_route(x, norm_weight, router, eps=1e-5)   # what runs for which token
    layout = mask_layout(mask)              # once per routing decision
    q = gemm_mn(x, w_q, layout_attention)   # query projection of the active head groups
    h = swiglu_up(x, w_gate, w_up, layout)  # FFN channels of the active groups
    y = gemm_k(h, w_down, layout, residual=x)  # summed over the active groups of input channels
    out = attention_prefill(q, k, v, layout_attention)      # causal, active heads only
    out = attention_decode(q, k_cache, v_cache, mask, lengths)
    # a decode step's rotation and cache entry beside it
    out, k_cache, v_cache = attention_step(q, k, v, k_cache, v_cache, mask, lengths, rotation)

docs/kernels.md explains layout, kernels and measurements.
"""

from pallas_kernels.attention_decode import attention_decode as attention_decode
from pallas_kernels.attention_prefill import attention_prefill as attention_prefill
from pallas_kernels.attention_step import attention_step as attention_step
from pallas_kernels.dispatch import Choice as Choice
from pallas_kernels.dispatch import explain as explain
from pallas_kernels.gemm_k import gemm_k as gemm_k
from pallas_kernels.gemm_mn import gemm_mn as gemm_mn
from pallas_kernels.layout import MaskLayout as MaskLayout
from pallas_kernels.layout import mask_layout as mask_layout
from pallas_kernels.norm_route import RouterWeights as RouterWeights
from pallas_kernels.norm_route import norm_route as norm_route
from pallas_kernels.norm_route import norm_route_step as norm_route_step
from pallas_kernels.norm_route import step_counter as step_counter
from pallas_kernels.project_qkv import project_qkv as project_qkv
from pallas_kernels.rms_norm import rms_norm as rms_norm
from pallas_kernels.rope_cache import rope_cache as rope_cache
from pallas_kernels.route_kv import route_kv as route_kv
from pallas_kernels.swiglu_up import swiglu_up as swiglu_up
