"""MBPP rows as `tandem data mbpp` makes them -> two rows a problem, one that asks for a program and one for a test.

    python examples/cure/prepare.py data/mbpp/train.parquet data/mbpp_cure/train.parquet

The two stand side by side, problems in an order drawn once: with `data.shuffle: false` and an even
`data.prompts_per_step`, both are asked in the same step.
"""

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CODER = "Write the complete program in one ```python block. For example, it must pass:"
TESTER = (
    "A program was written for this task. Write one new test for it that any right program passes and wrong ones fail: "
    "a single assert statement in one ```python block. An example of such a test:"
)


def rows_of(problem: dict[str, Any]) -> list[dict[str, Any]]:
    """The coder's and the tester's row. Both see the first test, which names the function; all tests are the truth."""
    task, truth = problem["extra_info"], problem["reward_model"]["ground_truth"]
    rows: list[dict[str, Any]] = []
    for role, instruction in (("coder", CODER), ("tester", TESTER)):
        content = f"{task['question']}\n\n{instruction}\n```python\n{truth['tests'][0]}\n```"
        extra = {"problem": task["index"], "role": role, "answer": task["answer"]}
        prompt = [{"role": "user", "content": content}]
        rows.append({**problem, "data_source": "mbpp_cure", "prompt": prompt, "extra_info": extra})
    return rows


def main(source: str, target: str) -> None:
    problems = pq.read_table(source).to_pylist()
    random.Random(0).shuffle(problems)
    rows = [row for problem in problems for row in rows_of(problem)]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), target)
    print(f"{len(rows)} rows, {len(problems)} problems: {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
