"""`tandem serve` as a command: its options, its mistakes, its end by signals."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import openai
import pytest
import torch
from openai import OpenAI

from tandem.cli import main
from tandem.config.load import config_of
from tandem.config.tree import ServeConfig
from tandem.generation.native import NativeEngine
from tandem.jobs.serve import make_answerer
from tandem.serving.server import reserve


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    return printed.err


def test_mistakes_in_options_are_told_together_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(
        capsys,
        "/nowhere",
        "generation.max_runing=3",
        "generation.eval={temperature: 1}",
        "generation.partial_rollouts=false",
        "model.lora={}",
        "model.dtype=float16",
        "data.shuffle=true",
    )
    assert "command line: 6 errors" in message
    for words in (
        "generation.max_runing: unknown key; did you mean generation.max_running?",
        "generation.eval: this command has no use for it",
        "generation.partial_rollouts: this command has no use for it",
        "model.lora: this command has no use for it",
        "model.dtype",
        "data: unknown key",
    ):
        assert words in message, message
    assert "generation" in refused(capsys, "/nowhere", "--engine", "tgi")


def test_mistakes_of_the_machine_are_told_with_their_mend(capsys: pytest.CaptureFixture[str], sort4: Path) -> None:
    with closing(reserve("127.0.0.1", 0)) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port}" in refused(capsys, str(sort4 / "model"), "--port", port)
    assert main(["serve", "/nowhere", "--port", "0"]) == 2
    printed = capsys.readouterr()
    assert "model.path: /nowhere is not there" in printed.err
    assert printed.out == "", "no token is made for what cannot be served"
    message = refused(capsys, str(sort4 / "model"), "--port", "0", "--engine", "sglang")
    assert "SGLang is not installed" in message


def test_engine_options_and_defaults_of_requests_are_those_of_the_configuration(sort4: Path) -> None:
    overrides = [
        "max_running=3",
        "temperature=0.5",
        "top_p=0.9",
        "top_k=7",
        "max_response_tokens=9",
        "stop_strings=[x]",
    ]
    given = [f"model.path={sort4 / 'model'}", "model.dtype=bfloat16", *(f"generation.{one}" for one in overrides)]
    answerer = make_answerer(config_of(ServeConfig, given), name="mine")
    assert isinstance(answerer.engine, NativeEngine) and answerer.name == "mine"
    assert answerer.engine._weight.dtype == torch.bfloat16 and len(answerer.engine._rows.state) == 3
    defaults = answerer.defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.max_tokens) == (0.5, 0.9, 7, 9)
    assert defaults.stop_strings == ("x",) and defaults.stop_token_ids == (1,)
    answerer.engine.close()


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the command, killed at the end if it has not ended."""
    code = "import sys; from tandem.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TANDEM_API_KEY": ""},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "by", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)], ids=lambda by: by.name
)
def test_a_signal_ends_the_server_with_0_and_without_a_traceback(
    sort4: Path, tmp_path: Path, by: signal.Signals
) -> None:
    """The server of a run's newest model, which is called as the run is."""
    run = tmp_path / "mine"
    shutil.copytree(sort4 / "model", run / "checkpoints" / "step_000001" / "model")
    (run / "checkpoints" / "latest").write_text("step_000001\n")
    with command(str(run), "--port", "0") as process:
        assert process.stdout is not None
        token = process.stdout.readline().removeprefix("token: ").strip()
        url, _, name = process.stdout.readline().partition("  model ")
        assert name == "mine\n"
        errors: list[openai.APIError] = []
        begun = threading.Event()

        def ask() -> None:
            with OpenAI(base_url=url, api_key=token, max_retries=0) as client:
                try:
                    while True:  # until the server has begun to stop
                        for _ in client.completions.create(
                            model="mine", prompt="4821=", n=64, max_tokens=500, stream=True
                        ):
                            begun.set()
                except openai.APIError as error:
                    errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(timeout=60)
        process.send_signal(by)
        asking.join()
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "stopped\n", f"{run}: loading torch and the model\n")
        assert "stopping" in errors[0].message
