"""Launch scripts: what is read is what a shell would pass, and what nobody knows here is marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import UserError
from tandem.importing import shell, verl_source
from tandem.importing.shell import Launch, flags_of, launched
from tests.sandboxes import sandboxed

pytestmark = sandboxed

CASES: dict[str, tuple[str, list[str]]] = {
    "a default that is kept": ("python x.py ${LR:=2e-6} $LR", ["2e-6", "2e-6"]),
    "one where nothing is set": ("python x.py ${LR=1e-3} ${KL-0.1}", ["1e-3", "0.1"]),
    "another where something is": ("LR=3; python x.py ${LR:+2e-6}", ["2e-6"]),
    "an end cut off": ("M=Qwen/Qwen3-4B-Base; python x.py ${M%-Base} ${M##*/}", ["Qwen/Qwen3-4B", "Qwen3-4B-Base"]),
    "a part in the place of another": ("M=a/b/c; python x.py ${M//\\//_} ${M:2} ${M:0:3} ${#M}",
        ["a_b_c", "b/c", "a/b", "5"]),
    "case": ("M=Qwen; python x.py ${M,,} ${M^^}", ["qwen", "QWEN"]),
    "a message for what is missing": ("P=/data; : ${P:?set P - x}; python x.py $P", ["/data"]),
    "arithmetic": ("a=3 b=4; python x.py $(((512*400))) $(((a + b) * 2)) $((2**10 % 1000)) $((a > 2 ? 7 : 8))",
                   ["204800", "14", "24", "7"]),
    "programs": ("python x.py $(basename /m/Qwen3.json .json) $(echo a b | tr a-z A-Z | cut -d ' ' -f 2) `echo 7`",
                 ["Qwen3", "B", "7"]),
    "a date": ("python x.py $(date -d @0 +%Y)", ["1970"]),
    "arrays": ('x=(1 "2 3"); x+=(4); python x.py "${x[@]}" ${#x[@]} ${x[2]}', ["1", "2 3", "4", "3", "4"]),
    "tables": ("declare -A t=([small]=8 [large]=64); s=large; python x.py ${t[$s]}", ["64"]),
    "loops": ("for n in 1 2 3; do k=$n; done; while [ $n -lt 5 ]; do n=$((n + 1)); done; python x.py $k $n",
        ["3", "5"]),
    "branches": ("s=big; case $s in b*) n=9 ;; *) n=1 ;; esac; if [[ $n == 9 ]]; then m=1; fi; python x.py $n $m",
                 ["9", "1"]),
    "expressions": ("if [[ abc =~ ^a(.)c$ ]]; then python x.py ${BASH_REMATCH[1]}; fi", ["b"]),
    "functions": ("f() { local x=$1; echo $((x * 2)); }; python x.py $(f 21)", ["42"]),
    "names of names": ("x=a; y=x; python x.py ${!y}", ["a"]),
    "arguments": ("set -- 5 6; shift; python x.py $1 $# $@", ["6", "1", "6"]),
    "two words without quotes": ("x='a b'; python x.py $x \"$x\"", ["a", "b", "a b"]),
    "quotes": ("python x.py 'a $b' \"it's\" $'a\\tb' a\\ b \"['$((1+1))']\"", ["a $b", "it's", "a\tb", "a b", "['2']"]),
    "braces": ("python x.py {1..3} {a,b}.json", ["1", "2", "3", "a.json", "b.json"]),
    "a document": ("read -r -d '' words <<EOF || true\n --x 1 \\\n --y 2\nEOF\npython x.py $words",
        ["--x", "1", "--y", "2"]),
    "a command in a variable": ("c='python x.py --x 5'; eval $c", ["--x", "5"]),
    "a command in quotes": ("srun --nodes 2 bash -c \"echo a && python x.py '1 2'\"", ["1 2"]),
    "a job of Ray": ("ray job submit --address=a:1 -- python x.py a=1", ["a=1"]),
    "one under another's care": ("nohup env A=1 timeout 5 python x.py b > log 2>&1 &", ["b"]),
    "a pipe": ("python x.py c 2>&1 | tee out/log.txt", ["c"]),
    "comments": ("python x.py a \\\n  b  # c\n# python x.py d", ["a", "b"]),
    "the home": ("python x.py ~/data $HOME/data '~'", ["~/data", "~/data", "~"]),
    "a folder": ('cd "$(dirname "$0")" && python x.py "$(pwd)"', ["{folder}"]),
}  # fmt: skip


def test_words_are_a_shell_s(tmp_path: Path) -> None:
    """Each case in a shell below that of the script."""
    path = tmp_path / "run.sh"
    text = "".join(
        f"(\n{case.replace('x.py', f'{number}.py', 9)}\nwait\n)\n" for number, (case, _) in enumerate(CASES.values())
    )
    path.write_text(text)
    quiet, *_ = shell._run(path, text, [])
    found: dict[str, list[str]] = {}
    for _, _, *words in quiet["starts"]:
        if words[0] == "python" and words[1].endswith(".py"):
            found[words[1]] = words[2:]
    for number, (name, (_, wanted)) in enumerate(CASES.items()):
        assert found.get(f"{number}.py") == [word.format(folder=tmp_path) for word in wanted], (name, quiet["errors"])


def is_training(words: Sequence[str]) -> bool:
    return "train.py" in words


def launch(tmp_path: Path, text: str, *arguments: str, command: int | None = None) -> Launch | None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return launched(path, text, is_training, arguments, command)


def read(tmp_path: Path, text: str, *arguments: str) -> dict[str, Any]:
    found = launch(tmp_path, text, *arguments)
    assert found is not None
    return found.values(lambda started: flags_of([word for word in started.words if word != "train.py"]))


def test_what_is_taken_from_elsewhere_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK_OF_NODE", raising=False)
    monkeypatch.setenv("SOME_MODEL", "/models/a")
    text = """
    gpus=$(nvidia-smi -L | wc -l)
    if python fused.py; then fused=yes; else fused=no; fi
    if python3 -c 'import pytest'; then here=yes; else here=no; fi
    DEVICE=${DEVICE:-$(python3 -c "import torch_npu" 2> /dev/null && echo npu || echo gpu)}
    python train.py --gpus $gpus --host run-$(hostname) --rank $RANK_OF_NODE --fused $fused --lr 1e-5 --here $here \\
        --on $DEVICE --model $SOME_MODEL --seed ${SEED:-7} --out $1
    """
    assert read(tmp_path, text) == {
        "gpus": "⟨0 or 1⟩", "here": "yes", "on": "gpu",
        "host": "run-⟨hostname⟩", "rank": "⟨RANK_OF_NODE⟩",
        "fused": "⟨yes or no⟩", "lr": 1e-5, "model": "/models/a", "seed": 7, "out": "⟨argument 1⟩",
    }  # fmt: skip
    assert read(tmp_path, text, "there")["out"] == "there"
    found = launch(tmp_path, text)
    assert found is not None and "did not run: hostname; nvidia-smi -L" in found.notes[0]


def test_a_script_that_wants_arguments_is_read_with_marks_in_their_place(tmp_path: Path) -> None:
    text = """
    if [ "$#" -lt 2 ]; then echo "usage: run.sh NUMBER PLACE"; exit 1; fi
    number=$1 place=$2; shift 2
    torchrun --nproc_per_node=$number train.py --out $place --steps 3 $@
    """
    assert read(tmp_path, text) == {"nproc_per_node": "⟨argument 1⟩", "out": "⟨argument 2⟩", "steps": 3}
    assert read(tmp_path, text, "4", "/o", "--steps", "9") == {"nproc_per_node": 4, "out": "/o", "steps": 9}


def test_arguments_that_are_only_passed_on_are_none(tmp_path: Path) -> None:
    text = 'python train.py --lr 1e-5 "$@"'
    assert read(tmp_path, text) == {"lr": 1e-5}
    assert read(tmp_path, text, "--lr", "3") == {"lr": 3}


def test_files_beside_the_script_are_read_and_none_is_changed(tmp_path: Path) -> None:
    (tmp_path / "common.env").write_text("export LR=3e-6\n")
    text = 'source "$(dirname "$0")/common.env"; rm -rf "$(dirname "$0")"/*; echo x > ~/y; python train.py --lr $LR'
    assert read(tmp_path, text) == {"lr": 3e-6}
    assert (tmp_path / "common.env").read_text() == "export LR=3e-6\n"


def test_paths_that_are_not_here_fail_nothing(tmp_path: Path) -> None:
    text = """
    set -euo pipefail
    cd /workspace/verl
    source /opt/conda/etc/profile.d/conda.sh
    [[ a/b =~ (.)/(.) ]] && M=/models/${BASH_REMATCH[2]}
    set +e; (exit 3); code=$?; set -e
    CUDA_VISIBLE_DEVICES=0 /opt/conda/bin/python train.py --folder "$(pwd)" --text "a > /x/y" --m $M --code $code \\
        2>&1 > /mnt/logs/a.log | tee /mnt/logs/b.log
    """
    assert read(tmp_path, text) == {"folder": "/workspace/verl", "text": "a > /x/y", "m": "/models/b", "code": 3}
    found = launch(tmp_path, text)
    assert found is not None and "source /opt/conda/etc/profile.d/conda.sh" in found.notes[0]
    found = launch(tmp_path, "rm -rf /\nkill -9 $$")
    assert found is None


def test_a_program_beside_the_script_starts(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text("#!/usr/bin/env bash\npython train.py --lr $1\n")
    assert read(tmp_path, 'cd "$(dirname "$0")"; ./inner.sh 3') == {"lr": 3}


def test_variables_of_other_places_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLACE", "NODES", "TOLD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OURS", "4")
    monkeypatch.setenv("HUB_TOKEN", "hf_secret")
    (tmp_path / "common.env").write_text("DATA=$PLACE/rows\nSIZE=${OURS:-1}\n")
    text = """
    source "$(dirname "$0")/common.env"
    : "${TOLD:?say it}"
    while [[ $# -gt 0 ]]; do case $1 in --lr) LR=$2; shift 2 ;; *) exit 1 ;; esac; done
    python train.py --data $DATA --size $SIZE --nodes $((NODES * 2)) --half $((OURS / 2)) --host $HOSTNAME \
        --token $HUB_TOKEN --told $TOLD
    """
    assert read(tmp_path, text) == {
        "data": "⟨PLACE⟩/rows", "size": 4, "nodes": "⟨14 or 48⟩", "half": 2, "host": "⟨HOSTNAME⟩",
        "token": "⟨HUB_TOKEN⟩", "told": "⟨TOLD⟩",
    }  # fmt: skip


def test_a_number_that_a_program_would_say_is_marked(tmp_path: Path) -> None:
    text = 'set -e; n=$(python -c "print(8)"); python train.py --gpus $((n * 2))'
    assert read(tmp_path, text) == {"gpus": "⟨0 or 14 or 48⟩"}


def test_the_likest_of_other_commands_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "DATA"):
        monkeypatch.delenv(name, raising=False)
    text = '[ -z "$FIRST" ] || python train.py --stage 0\npython train.py --data $DATA/rows --stage 1'
    assert read(tmp_path, text) == {"data": "⟨DATA⟩/rows", "stage": 1}


def test_of_several_trainings_one_is_chosen(tmp_path: Path) -> None:
    text = "for lr in 1 2 3; do python train.py --lr $lr --steps 5; done"
    with pytest.raises(UserError, match=r"it starts 3 trainings; give --command 1 to 3\n  1: 1\n  2: 2\n  3: 3"):
        launch(tmp_path, text)
    found = launch(tmp_path, text, command=2)
    assert found is not None and found.command.words == ["python", "train.py", "--lr", "2", "--steps", "5"]
    with pytest.raises(UserError, match=r"--command 4: it starts 3"):
        launch(tmp_path, text, command=4)
    assert launch(tmp_path, "python train.py --lr 1\npython train.py --lr 1\n") is not None, "twice the same"


@pytest.mark.parametrize("between", ["&&", ";"])
def test_a_later_training_is_not_compared_with_an_earlier_one(between: str, tmp_path: Path) -> None:
    """In the run in which programs fail only the first training of the script is started."""
    text = f"set -e\npython train.py --stage 1 --data $DATA {between} python train.py --stage 2 --lr $(nproc)"
    found = launch(tmp_path, text, command=2)
    assert found is not None
    values = found.values(lambda started: flags_of(started.words[2:]))
    assert values == {"stage": 2, "lr": "⟨nproc⟩"}
    assert any(note.startswith("how many trainings run.sh starts depends") for note in found.notes)


def test_values_of_a_command_line_are_text_but_for_numbers_and_brackets() -> None:
    words = ["a: b", "- a", "one\ntwo", "# Answer", "a # b", "{a: 1}", "[1, 2]", "'x'", "1e-6", "true", "null"]
    expected = [*words[:5], {"a": 1}, [1, 2], "x", 1e-6, True, None]
    assert [flags_of(["--x", word])["x"] for word in words] == expected


def test_a_short_option_is_no_value_of_the_one_before() -> None:
    assert flags_of(["--num_processes", "4", "-m"]) == {"num_processes": 4}
    assert flags_of(["--low", "-1", "-q", "5", "--high", "2"]) == {"low": -1, "high": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('python train.py --x "1\n', "a shell refuses it: .*unexpected EOF"),
        ("if true; then\n", "a shell refuses it: .*syntax error"),
    ],
)
def test_scripts_that_tell_nothing(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        launch(tmp_path, text)
    assert launch(tmp_path, "echo nothing") is None


@pytest.mark.parametrize("how", ['eval "$CMD"', 'bash -c "$CMD"', 'sh -c "$CMD"'])
def test_what_programs_say_in_a_command_that_a_shell_reads_again_is_marked(how: str, tmp_path: Path) -> None:
    asked = """$(python3 tune.py "the 'best' (lr); a & b | c < d > e")"""
    script = f"CMD='python train.py --lr '{asked}' --gpus '$(nvidia-smi --list-gpus | wc -l)\n{how}"
    found = read(tmp_path, script)
    assert found["lr"] == "⟨python3 tune.py the 'best' (lr); a & b | c < d > e⟩" and found["gpus"] == "⟨0 or 1⟩"


def test_a_script_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"does not come to an end within 0\.5 s"):
        launch(tmp_path, "while true; do ray status; done")


def test_why_a_script_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path, text = tmp_path / "run.sh", '[ "$RANK" -eq 0 ] || exit 3\npython -m verl.trainer.main_ppo a=$1\n'
    path.write_text(text)
    with pytest.raises(
        UserError, match=r"integer expression expected; it ended with status 3; nobody gave RANK, .*RANK=…"
    ):
        verl_source.read(path)
    monkeypatch.setenv("RANK", "0")
    assert verl_source.read(path, None, ["5"]).values == {"a": 5}


def test_without_a_sandbox_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"a launch script runs in the sandbox, .* bubblewrap .* is not installed"):
        launch(tmp_path, "python train.py")
