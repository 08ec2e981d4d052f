"""The tables of other frameworks' keys, and how their rows are read."""

import re
from collections.abc import Iterator

import pytest

from tandem.config.counterparts import Key, Table, positive, texts, under
from tandem.config.keys import every_key
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.config.verl_keys import KEYS
from tandem.importing import openrlhf, openrlhf_tables, trl, trl_tables, verl_sft
from tandem.importing.outcome import Imported, Keys

KINDS = {"train": TrainConfig, "sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}


def tables() -> Iterator[tuple[str, str, Table]]:
    """The framework and its program, the command of ours, the table."""
    yield "verl", "train", KEYS
    for engine in (False, True):
        yield f"verl sft, engine {engine}", "sft", verl_sft.table(engine)
    for method, command in openrlhf.COMMANDS.items():
        yield f"openrlhf {method}", command, openrlhf_tables.table(method)
    for method, command in trl.COMMANDS.items():
        yield f"trl {method}", command, trl_tables.table(method)


@pytest.mark.parametrize(("command", "table"), [pytest.param(*one, id=name) for name, *one in tables()])
def test_what_a_row_writes_and_asks_for_is_a_key_of_the_command(command: str, table: Table) -> None:
    known = set(every_key(KINDS[command]))
    parents = {key.rpartition(".")[0] for key in known}
    for theirs, row in table.items():
        if isinstance(row, Key):
            free = re.match(r"generation\.engine_args\.", row.ours)
            assert free or row.ours in known, theirs
            assert not row.when or row.when[0] in {*known, *parents}, theirs


TABLE: Table = {
    "kind": Key("algorithm.type", "a", {"a": "one", "b": "two"}),
    "n": Key("algorithm.group_size", 4, unless=8, older=("oldest", "older")),
    **under("opt.", "optimizer.", {"lr": Key("lr"), "steps": Key("warmup_steps", convert=positive), "r": "lr, so"}),
    **under("c.", "critic.", {"lr": Key("lr", 0.1), "x": Key("y", 3, when=("lr",))}, ("algorithm.type", "two")),
}


def read(**values: object) -> tuple[Keys, Imported]:
    keys, made = Keys({key.replace("__", "."): value for key, value in values.items()}, TABLE), Imported({})
    keys.take_rows(made)
    return keys, made


def test_a_row_is_a_value_or_their_default_unless_it_is_ours() -> None:
    keys, made = read()
    assert made.tree == {"algorithm": {"type": "one", "group_size": 4}} and keys.taken == {}
    keys, made = read(n=8, opt__lr=1, opt__steps=-1, kind="⟨only a run tells⟩")
    assert made.tree == {"algorithm": {"type": "one"}, "optimizer": {"lr": 1}}
    assert keys.taken == {"n": "algorithm.group_size", "opt.lr": "optimizer.lr", "opt.steps": "optimizer.warmup_steps"}


def test_older_names_are_read_where_newer_ones_are_not_given() -> None:
    assert read(oldest=1, older=2)[1].tree["algorithm"]["group_size"] == 2
    keys, made = read(oldest=1, n=3)
    assert made.tree["algorithm"]["group_size"] == 3 and [*keys.taken] == ["oldest", "n"]


def test_a_row_is_read_where_its_condition_holds() -> None:
    keys, made = read(c__lr=0.2)
    assert "critic" not in made.tree and "c.lr" not in keys.taken
    assert texts(TABLE)["c.lr"] == "critic.lr, with algorithm.type: two"
    assert read(kind="b")[1].tree["critic"] == {"lr": 0.1, "y": 3}


def test_a_name_that_is_not_known_is_the_first_of_all_and_told() -> None:
    made = read(kind="c")[1]
    assert made.tree["algorithm"]["type"] == "one" and "kind=c: there is none of that name here" in made.notes[0]


def test_a_key_that_is_asked_for_becomes_what_the_table_says() -> None:
    keys = read(opt__r=3)[0]
    assert keys.take("opt.r") == 3 and keys.taken == {"opt.r": "optimizer.lr"}
    with pytest.raises(KeyError):
        Keys({"new": 1}, TABLE).take("new")
