"""Attention of one token a row against its cache, skipping head groups."""

from pallas_kernels.attention_decode.api import attention_decode as attention_decode
