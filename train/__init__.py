"""Training: router calibration (stage 1) and LoRA recovery (stage 2).

from train import TrainConfig, calibrate

result = calibrate(model, tokens, TrainConfig(sparsity=0.25, updates=250, ...))
"""

from train.config import TrainConfig as TrainConfig
from train.loop import CalibrationResult as CalibrationResult
from train.loop import calibrate as calibrate
from train.records import UpdateRecord as UpdateRecord
