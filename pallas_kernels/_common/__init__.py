"""What every op shares: device limits, tile configs, tuned tables, kernel bodies, test helpers."""
