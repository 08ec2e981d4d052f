"""`tandem search`: a corpus -> an index -> a server of it."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

from tandem.data.rows import BadRow, Row, cell, in_words, read_rows
from tandem.errors import UserError
from tandem.search.index import Passage, build_index, open_index
from tandem.search.vectors import Embedding
from tandem.serving.limits import ServerLimits


def make_index(corpus: Path, out: Path, embedding: Embedding | None) -> int:
    """Index the passages of a parquet or JSON-lines file; returns how many there are. Raises UserError."""
    return build_index(_passages(corpus), out, embedding)


def serve_over_stdio(index: Path) -> None:
    """As an MCP server, until standard input ends."""
    from tandem.serving.search_server import make_mcp_server

    make_mcp_server(open_index(index)).run("stdio")


def serve_over_http(index: Path, reserved: socket.socket, token: str, limits: ServerLimits) -> None:
    """As an MCP server and over plain HTTP, until Ctrl-C or SIGTERM."""
    from tandem.serving.search_server import run_search_server

    asyncio.run(run_search_server(open_index(index), reserved, token, limits))


def _passages(corpus: Path) -> Iterator[Passage]:
    rows: dict[str, int] = {}
    for number, row in read_rows(corpus):
        try:
            if isinstance(row, BadRow):
                raise row
            passage = _passage_of(row)
            if (earlier := rows.setdefault(passage.id, number)) != number:
                raise BadRow(f"the id {passage.id!r} is that of row {earlier}, too; give each passage its own")
        except BadRow as bad:
            raise UserError(f"{corpus}, row {number}: {bad}") from None
        yield passage


def _passage_of(row: Row) -> Passage:
    """`{id, title, text}`, the title being optional; or `{id, contents}` as Search-R1 publishes them: the title in
    quotation marks, a line break, the text."""
    if not isinstance(row.get("id"), (str, int)) or row["id"] == "":
        raise BadRow(f"column `id` is {row.get('id')!r}, not a text or a number; each passage needs one")
    if "text" not in row and "contents" in row:
        title, _, text = cell(row, "contents", str).partition("\n")
        return Passage(str(row["id"]), title.strip('"') if text else "", text or title)
    title = row.get("title") or ""
    if not isinstance(title, str):
        raise BadRow(f"column `title` has the wrong type: {in_words(type(title))}, not text")
    return Passage(str(row["id"]), title, cell(row, "text", str))
