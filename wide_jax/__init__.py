"""Token-level dynamic width pruning for Llama- and Qwen-architecture language models."""
