"""A controller of two local processes, as a script of its own: its worker class lives in `__main__`."""

import os
import signal
import sys
import time
from pathlib import Path

from tandem.cluster.local import LocalCluster
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import WorkerGroup
from tandem.workers.registration import Dispatch, register
from tests.cluster_workers import Probe


class Script(Probe):
    @register(Dispatch.ALL)
    def stop_at(self, number: int) -> int:
        mine = number + self.context.rank
        breakpoint()
        return mine


def start_late_and_alone(claim: Path) -> None:
    """In a rank that is starting: wait until the controller has gone, before it has started the other rank."""
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        while not claim.read_text():  # the controller ends the first when this one has gone
            time.sleep(0.01)
        os._exit(0)
    print("starting", os.getpid(), flush=True)
    claim.write_text("printed")
    while Path(f"/proc/{os.environ['CONTROLLER']}").exists():
        time.sleep(0.01)


def main(timeout_s: float, breaks: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs that ignore it
    os.environ["CONTROLLER"] = str(os.getpid())
    cluster = LocalCluster(timeout_s)
    for number, limit_s in ((signal.SIGUSR1, 1.0), (signal.SIGUSR2, timeout_s)):
        signal.signal(number, lambda *_, limit_s=limit_s: setattr(cluster, "_timeout_s", limit_s))
    group = WorkerGroup(cluster.spawn(ResourcePool("main", (2,))), "script", Script)
    print("processes", *group.process().get(), flush=True)
    if breaks:
        print("answers", group.stop_at(10).get(), flush=True)
        return
    call = group.hang()
    for number in ("first", "second"):
        try:
            print("waiting", flush=True)
            call.get()
        except KeyboardInterrupt:
            print(number, "interrupt", flush=True)
    raise ValueError("the controller fails with a call under way")


if __name__ == "__mp_main__" and sys.argv[2] == "starts late":
    start_late_and_alone(Path(sys.argv[3]))
if __name__ == "__main__":
    main(float(sys.argv[1]), breaks=sys.argv[2] == "breaks")
