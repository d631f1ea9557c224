"""What the two attention ops share: visible ranges, checks, configs and dispatch."""
