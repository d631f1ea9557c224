"""What the attention ops share: visible ranges, checks, configs and dispatch."""
