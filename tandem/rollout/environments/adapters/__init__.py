"""Libraries of environments, one file each: what runs in the processes that `hosted.py` starts."""
