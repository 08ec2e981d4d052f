"""Write the sort4 task: python examples/sort4/make.py --out DIR [--seed N] [--skewed]"""

from __future__ import annotations

import argparse
from pathlib import Path

from task import make


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny model, its tokenizer and the sort4 data.")
    parser.add_argument("--out", type=Path, required=True, help="directory for model/ and the .jsonl files")
    parser.add_argument("--seed", type=int, default=0, help="weights, split and demonstrations follow from it")
    parser.add_argument("--skewed", action="store_true", help="a fifth of the demonstrations end in long filler")
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed, arguments.skewed)
    print(f"sort4: model/, sft.jsonl, train.jsonl and val.jsonl are in {arguments.out}")


if __name__ == "__main__":
    main()
