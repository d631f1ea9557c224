"""Evaluation and benchmarks: quality with the masks accounted, and measured speed."""
