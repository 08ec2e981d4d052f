"""Where worker processes come from: this process, this machine, Ray."""
