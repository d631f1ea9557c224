"""Causal attention of many tokens that skips (token, head group) pairs."""

from pallas_kernels.attention_prefill.api import attention_prefill as attention_prefill
