"""What documents name exists: files, links, functions, configuration keys, metrics, commands and their options.

Read are README, CONTRIBUTING, docs/, recipes/ and examples/; and of the package the files that comments name.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from documents import Document, read_markdown, read_plain, read_source
from named import check_command, check_file, check_inline, check_python, check_yaml

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [
    *sorted((ROOT / "recipes").glob("*.yaml")),
    *sorted((ROOT / "examples").rglob("*.sh")),
    *sorted((ROOT / "examples").rglob("*.py")),
]


def read(path: Path) -> Document:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return read_markdown(path, text)
    return read_plain(path, (ast.get_docstring(ast.parse(text)) or "") if path.suffix == ".py" else text)


def problems(document: Document) -> list[str]:
    """What is wrong, each with its place."""
    found = [f"{one.place}: {problem}" for one in document.words for problem in check_inline(one.text, one.under)]
    checks = ((document.lines, check_command), (document.yaml, check_yaml), (document.python, check_python))
    found += [
        f"{one.place}: {problem}" for mentions, check in checks for one in mentions for problem in check(one.text)
    ]
    return found + [f"{link.place}: {problem}" for link in document.links if (problem := broken(document, link.text))]


def broken(document: Document, link: str) -> str | None:
    """A link leads to a file beside the document, and to a heading in it."""
    target, _, heading = link.partition("#")
    path = (document.path.parent / target).resolve() if target else document.path
    if target and not path.exists():
        return f"a link to {target}, which is not there"
    if heading and heading not in (read(path) if target else document).anchors:
        return f"a link to {link}, but {path.name} has no such heading"
    return None


@pytest.mark.parametrize("path", PAGES + OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(path: Path) -> None:
    assert problems(read(path)) == []


def files_named(document: Document) -> list[str]:
    return [f"{one.place}: {problem}" for one in document.words for problem in check_file(one.text, one.under)]


def test_a_file_that_a_comment_of_the_package_names_is_beside_it() -> None:
    sources = sorted((ROOT / "tandem").rglob("*.py"))
    assert [problem for path in sources for problem in files_named(read_source(path, path.read_text("utf-8")))] == []


FAULTS = {
    "`trainer.save_often`": "no configuration key trainer.save_often",
    "`generation.sleep: weights`, `training.shards: 8`": "training.shards",
    "`{type: truncate, levels: sequence}`": ".levels",
    "`actor/klx`": "no metric actor/klx",
    "`time/actor_update_s`": "no metric time/actor_update_s",
    "`val/<source>/acc/worst@4`": "no metric val/<source>/acc/worst@4",
    "`tandem trial CONFIG`": "no command tandem trial",
    "`tandem reward try F`": "no command tandem reward try",
    "`--dry`": "no command has the option --dry",
    "`scripts/tests`": "no file scripts/tests",
    "`tandem/{types,nouns}.py`": "no file tandem/nouns.py",
    "`generation/vlm.py`": "no file generation/vlm.py",
    "`optimizing/`": "no file optimizing/",
    "`vlm.py`": "no file vlm.py",
    "`memory.py`": "no file memory.py",
    "`optimizing/memory.py`": "no file optimizing/memory.py",
    "- `planning/`: `mends.py` and `admission.py`": "no file admission.py in tandem/planning",
    "- `docs/` and `planning/`:\n  - more, `admission.py`": "no file admission.py in docs or tandem/planning",
    "| a | b |\n| --- | --- |\n| `planning/` | `roles.py` |": "no file roles.py in tandem/planning",
    "`tandem/types.py:Ask`": "tandem/types.py defines no Ask",
    "`generation/types.py:Ask`": "no file generation/types.py",
    "`tandem.types:Ask`": "tandem.types defines no Ask",
    "`gsm8k:strictest`": "gsm8k defines no strictest",
    "`tandem.types.Ask`": "nothing is called tandem.types.Ask",
    "`RemoteWorkers.call_some`": "RemoteWorkers has no call_some",
    "`RolloutAsk`": "nothing is called RolloutAsk",
    "`dull_groups()`": "nothing is called dull_groups",
    "    tandem train C.yaml trainer.save_often=3": "no configuration key trainer.save_often",
    "    tandem train C.yaml \\\n        --again": "tandem train has no option --again",
    "    tandem train recipes/sort5.yaml": "no file recipes/sort5.yaml",
    "    python -m pdb -m tandem.cli train C.yaml": "python -m tandem.cli runs nothing",
    "    python -m tandem trial C.yaml": "no command tandem trial",
    "    scripts/quickstart --sede 3": "scripts/quickstart has no option --sede",
    "```sh\npython benchmarks/gpu.py\n```": "no file benchmarks/gpu.py",
    "```yaml\nreward: {functions: [], patience: 3}\n```": "no configuration key reward.patience",
    "```yaml\n- [\n```": "a block that is no YAML",
    "```python\nfrom tandem.types import Ask\n```": "tandem.types has no Ask",
    "```python\nimport tandem\n\ntandem.Ask()\n```": "nothing is called tandem.Ask",
    "[x](docs/other.md)": "a link to docs/other.md, which is not there",
    "[x](docs/engines.md#tgi)": "engines.md has no such heading",
    "# One\n\n[x](#two)": "no such heading",
    "![x](docs/curve.svg)": "a link to docs/curve.svg",
}
"""A document's text, and what is to be said of it."""


@pytest.mark.parametrize("text", FAULTS)
def test_a_name_of_nothing_is_found(text: str) -> None:
    found = problems(read_markdown(ROOT / "page.md", f"# Page\n\n{text}\n"))
    assert len(found) == 1 and FAULTS[text] in found[0] and found[0].startswith("page.md:")


SOUND = """# A page, with `code`

`trainer.max_restarts`, `trainer.max_restarts: 3`, `cluster: {type: local, ranks: 1}`, `placement.pools.main=[8, 8]`,
`generation.engine_args.anything`, `{type: mask, lower: 0.5}`, `reward/mean`, `actor/*`, `val/<source>/acc/mean@16`,
`tandem train --resume RUN`, `tandem COMMAND`, `--dry-run`, `scripts/test tests/unit`, `tandem/{types,errors}.py`,
`weights/`, `fixes.py`, `config.yaml`, `CONFIG.yaml`, `path/to/file.py:function`, `rewards/sums.py:compute_score`,
`tandem/types.py:Batch.row_of_token`, `math:dapo`, `tandem.types.Batch`, `tandem.Trainer`, `Batch.tokens`,
`localhost:8000`, `torch.nn`, `compute_advantages()`, `NCCL_SOCKET_IFNAME`, `x + y`, `[B, T]`, `and/or`,
[itself](#a-page-with-code), [elsewhere](https://example.org), [types](tandem/types.py),
[metrics](docs/metrics.md#policy)

    tandem train CONFIG.yaml --debug-rollout 'algorithm.type=grpo' && python examples/sort4/make.py --out DIR
    loss = -A * min(r, clip(r))                 # some formula

- `planning/` and `cluster/`: `mends.py`, `ray.py`, and below `trace/` and `pretend.py`; `config.json`.
- `fixes.py`
"""


def test_what_exists_or_is_not_ours_is_left_alone() -> None:
    assert problems(read_markdown(ROOT / "page.md", SOUND)) == []


COMMENTED = '''"""Beside it `mends.py`, below `trace/` and `pretend.py`, elsewhere `types.py`
and `controller/admission.py`; `admission.py`.
"""

LIMIT = 3  # as `wire.py` has it, `x.y` and `config.json`
"""Of `planning/memory.py:Memory`."""
'''


def test_a_stale_name_in_a_comment_is_found() -> None:
    path = ROOT / "tandem/planning/page.py"
    assert files_named(read_source(path, COMMENTED)) == [
        "tandem/planning/page.py:1: no file types.py in tandem/planning",
        "tandem/planning/page.py:2: no file admission.py in tandem/planning",
        "tandem/planning/page.py:5: no file wire.py in tandem/planning",
        "tandem/planning/page.py:6: no file planning/memory.py",
    ]
