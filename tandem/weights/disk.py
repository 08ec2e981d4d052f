"""Weights through a directory of safetensors: slow, and asks nothing of an engine but to read a model directory."""

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from tandem.weights.base import Commit, Deliver, Directory, Weights


class DiskSync:
    """A WeightSync that leaves the weights of the last publish on disk."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._home = Path(tempfile.mkdtemp(prefix="tandem-weights-"))

    def publish(self, version: int, weights: Weights | None, deliver: Deliver) -> None:
        if weights is not None:
            directory = self._home / str(version)
            directory.mkdir()
            self._write(directory, weights)
            deliver(Directory(directory))()
            for old in self._home.iterdir():
                if old != directory:
                    shutil.rmtree(old)
        deliver(Commit(version))()

    def repeat(self, version: int, deliver: Deliver) -> bool:
        for directory in self._home.iterdir():
            deliver(Directory(directory))()
        deliver(Commit(version))()
        return True

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def _write(self, directory: Path, weights: Weights) -> None:
        """A file a bucket, and their index."""
        held: dict[str, object] = {}
        places: dict[str, str] = {}

        def write() -> None:
            file = f"model-{len(set(places.values())):05}.safetensors"
            save_file(held, directory / file)  # type: ignore[arg-type]
            places.update(dict.fromkeys(held, file))
            held.clear()

        size = 0
        for name, tensor in weights:
            if held and size + tensor.nbytes > self._bucket_bytes:
                write()
                size = 0
            held[name] = tensor.detach().cpu().clone()
            size += tensor.nbytes
        write()
        index = json.dumps({"metadata": {}, "weight_map": places})
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
