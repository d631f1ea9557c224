"""The routing decision of an attention sublayer beside its token's keys and values."""

from pallas_kernels.route_kv.api import route_kv as route_kv
