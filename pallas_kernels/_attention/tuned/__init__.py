"""The fastest attention implementations, one JSON file a device kind."""
