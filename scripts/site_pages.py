"""What mkdocs reads, in build/site: the pages with links as a site has them, the reference, and the order of it all.

Links that lead out of docs/ name a file of the repository: that it is there is checked here, and its name is shown.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DOCS, OUT = ROOT / "docs", ROOT / "build/site"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
ORDER = {
    "Start": ["index.md", "sizes.md", "reading.md", "structure.md", "walkthrough.md", "faq.md"],
    "Train": [
        "data.md",
        "rewards.md",
        "runs.md",
        "python.md",
        "configuration.md",
        "metrics.md",
        "tracking.md",
        "evaluation.md",
    ],
    "Algorithms": ["algorithms/README.md", "rollout_correction.md", "extend.md", "ppo_by_hand.md"],
    "Conversations": ["agents.md", "agents/formats.md", "search.md", "sandbox.md", "serving.md"],
    "Models": ["models.md", "pictures.md"],
    "Scale": [
        "plan.md",
        "performance.md",
        "gpu.md",
        "training.md",
        "engines.md",
        "async.md",
        "megatron.md",
        "multinode.md",
        "simulate.md",
    ],
    "Coming from": ["verl.md", "trl.md", "openrlhf.md", "scripts.md"],
    "When something is wrong": ["debugging.md", "benchmarks.md"],
}
"""Pages by part; what is in none of them comes at the end of the part that its folder names, or in `More`."""
SETTINGS = {
    "site_name": "Tandem",
    "site_description": "Reinforcement-learning post-training for language models",
    "docs_dir": "docs",
    "site_dir": "html",
    "theme": {
        "name": "material",
        "font": False,  # nothing is fetched from elsewhere
        "features": ["navigation.sections", "navigation.top", "search.highlight", "content.code.copy"],
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default"},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
        ],
    },
    "markdown_extensions": [
        "tables",
        "admonition",
        "pymdownx.superfences",
        {"pymdownx.highlight": {"anchor_linenums": False}},
        {"toc": {"permalink": True}},
    ],
    "plugins": [
        "search",
        {
            "mkdocstrings": {
                "handlers": {
                    "python": {
                        "paths": [str(ROOT)],
                        "options": {
                            "heading_level": 3,
                            "show_root_heading": True,
                            "show_root_full_path": False,
                            "show_source": False,
                            "merge_init_into_class": True,
                            "members_order": "source",
                        },
                    }
                }
            }
        },
    ],
    "validation": {
        "nav": {"omitted_files": "warn", "not_found": "warn"},
        "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
    },
}


def page(source: Path, place: Path) -> list[str]:
    """Write a page; returns what is wrong with its links out of docs/."""
    wrong: list[str] = []

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return found.group()
        file = (source.parent / path).resolve()
        if not file.exists():
            wrong.append(f"{source.relative_to(ROOT)}: {target}: there is no such file")
        if file.suffix == ".md" and file.is_relative_to(DOCS):
            up = "../" * len(place.parent.relative_to(OUT / "docs").parts)
            return f"[{text}]({up}{file.relative_to(DOCS)}{'#' + anchor if anchor else ''})"
        return text if file.is_relative_to(ROOT) and not file.is_relative_to(DOCS) else found.group()

    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(LINK.sub(link, source.read_text(encoding="utf-8")), encoding="utf-8")
    return wrong


def exported() -> dict[str, tuple[str, ...]]:
    """Public names by module, without importing the package, which needs torch."""
    for node in ast.parse((ROOT / "tandem/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_EXPORTS":
            return ast.literal_eval(node.value)
    raise AssertionError("tandem/__init__.py has no _EXPORTS")


def reference() -> str:
    names = sorted((name, module) for module, some in exported().items() for name in some)
    head = (
        "# API reference\n\nWhat `import tandem` has, from its docstrings; everything else may change without notice.\n"
    )
    return head + "".join(f"\n::: tandem.{module}.{name}\n" for name, module in names)


def navigation(pages: list[str]) -> list[dict[str, object]]:
    parts = {part: [name for name in names if name in pages] for part, names in ORDER.items()}
    placed = {name for names in parts.values() for name in names} | {"reference.md"}
    for name in pages:
        if name not in placed:
            part = {"algorithms": "Algorithms", "agents": "Conversations", "decisions": "Decisions"}
            parts.setdefault(part.get(name.partition("/")[0], "More") if "/" in name else "More", []).append(name)
    return [*({part: names} for part, names in parts.items()), {"API reference": "reference.md"}]


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    wrong = page(ROOT / "README.md", OUT / "docs/index.md")
    for source in sorted(DOCS.rglob("*")):
        place = OUT / "docs" / source.relative_to(DOCS)
        if source.suffix == ".md":
            wrong += page(source, place)
        elif source.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
    (OUT / "docs/reference.md").write_text(reference(), encoding="utf-8")
    pages = sorted(str(path.relative_to(OUT / "docs")) for path in (OUT / "docs").rglob("*.md"))
    settings = {**SETTINGS, "nav": navigation(pages)}
    (OUT / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
