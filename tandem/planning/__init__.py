"""What a configuration needs, before anything runs: memory, time, places. No torch, but in `trace/`."""
