"""The commands `tandem search …`: an index of passages, and a server of it."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from tandem.commands.shared import ClientTimeout, MaxBodyMib, MaxConnections, token
from tandem.errors import UserError
from tandem.serving.limits import USUAL, ServerLimits

search_app = typer.Typer(no_args_is_help=True, help="Search in passages: an index, and a server of it.")


@search_app.command("index")
def search_index(
    corpus: Annotated[Path, typer.Argument(help="Rows {id, title, text}: a parquet or JSON-lines file.")],
    out: Annotated[Path, typer.Argument(help="The index: a directory that is not there yet.")],
    dense: Annotated[
        Path | None, typer.Option(help="By vectors of this sentence-embedding model's directory, not by words.")
    ] = None,
    query_prefix: Annotated[str, typer.Option(help="With --dense: what goes before each query.")] = "",
    passage_prefix: Annotated[str, typer.Option(help="With --dense: what goes before each passage.")] = "",
) -> None:
    """Index passages for search by words (BM25), or by vectors."""
    if dense is None and (query_prefix or passage_prefix):
        raise UserError("--query-prefix and --passage-prefix are for --dense; words are compared as they are")
    from tandem.jobs.passage_index import make_index
    from tandem.search.vectors import Embedding

    embedding = Embedding(str(dense.absolute()), query_prefix, passage_prefix) if dense else None
    print(f"passages {make_index(corpus, out, embedding)}")


@search_app.command("serve")
def search_serve(
    index: Annotated[Path, typer.Argument(help="What tandem search index has made.")],
    stdio: Annotated[bool, typer.Option("--stdio", help="MCP over standard input and output, without HTTP.")] = False,
    host: Annotated[str, typer.Option(help="Loopback unless you say otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 8001,
    max_connections: MaxConnections = USUAL.connections,
    client_timeout: ClientTimeout = USUAL.client_timeout_s,
    max_body_mib: MaxBodyMib = USUAL.body_mib,
) -> None:
    """Search as an MCP server, and over plain HTTP. Its token is TANDEM_API_KEY, else a new one that is printed."""
    try:
        from tandem.serving import search_server as needed  # noqa: F401
        from tandem.serving.server import reserve
    except ModuleNotFoundError as error:
        extras = "pip install -e '.[agents,search,serve]' in a clone of Tandem"
        raise UserError(f"tandem search serve needs {error.name}: {extras}") from None
    from tandem.jobs.passage_index import serve_over_http, serve_over_stdio

    if stdio:
        serve_over_stdio(index)
        return
    with closing(reserve(host, port)) as reserved:
        limits = ServerLimits(max_connections, client_timeout, max_body_mib)
        serve_over_http(index, reserved, token(), limits)
    print("stopped")
