"""Tables of tuned configs, one JSON file a device kind (`_common/tuned.py` reads them)."""
