"""A Markdown table of the JSON lines that benchmarks print last: scripts/table.py FILE."""

import json
import sys
from pathlib import Path

print("| benchmark | figure | value |\n| --- | --- | --- |")
for line in Path(sys.argv[1]).read_text().splitlines():
    result = json.loads(line)
    for name, value in result["figures"].items():
        print(f"| {result['benchmark']} | {name.replace('_', ' ')} | {value:,} |")
