import pytest

from ds_hetero.elastic.node.launch import parse_options
from ds_hetero.errors import ConfigError
from ds_hetero.values.section import read_section


def test_the_defaults_are_one_copy_and_steps_as_they_cost_nothing():
    elastic = read_section({"elastic": {}}).elastic
    assert (elastic.every_steps, elastic.copies, elastic.min_ranks, elastic.memory_gib) == (None, 1, None, None)
    assert read_section({}).elastic is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("every_steps", 0),
        ("every_steps", 2.5),
        ("every_steps", True),
        ("copies", -1),
        ("copies", 9),
        ("min_ranks", 0),
        ("memory_gib", 0),
        ("notice_s", "soon"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_is_accepted(key, value):
    with pytest.raises(ConfigError, match=rf'"heterogeneity.elastic.{key}".*It takes a'):
        read_section({"elastic": {key: value}})


def test_an_unknown_key_is_named():
    with pytest.raises(ConfigError, match=r'elastic.every_step" is unknown.*did you mean "every_steps"'):
        read_section({"elastic": {"every_step": 3}})
    with pytest.raises(ConfigError, match=r'"heterogeneity.elastic": 5'):
        read_section({"elastic": 5})


def test_options_before_the_script_are_the_launchers_and_those_after_it_the_scripts():
    options = parse_options(["--min-ranks", "2", "--join", "host:1", "train.py", "--min-ranks", "9"])
    assert (options.min_ranks, options.join, options.command) == (2, "host:1", ["train.py", "--min-ranks", "9"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-ranks", "0", "x.py"], "--min-ranks must be at least 1"),
        (["--min-ranks", "4", "--ranks", "3", "x.py"], "--min-ranks 4 is more than the --ranks 3"),
        (["--memory-gib", "-1", "x.py"], "--memory-gib must be more than 0"),
        (["--memory-gib", "nan", "x.py"], "--memory-gib must be more than 0"),
        ([], "no script"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse_options(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err
