"""Training: router calibration (stage 1) and LoRA recovery (stage 2)."""
