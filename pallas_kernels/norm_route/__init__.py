"""RMS norm and routing decision of a sublayer, from one pass over the residual stream."""

from pallas_kernels.norm_route.api import RouterWeights as RouterWeights
from pallas_kernels.norm_route.api import norm_route as norm_route
from pallas_kernels.norm_route.api import norm_route_step as norm_route_step
from pallas_kernels.norm_route.api import step_counter as step_counter
