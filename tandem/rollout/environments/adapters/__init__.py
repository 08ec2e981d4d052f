"""Libraries of environments, one file each: what runs in the processes that `rollout/environments/hosted.py` starts."""
