"""Values of the configuration: each key has a range, and what is out of it starts nothing."""

import math

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from small_runs import COMMAND

from fedapps.common.settings import Interval
from fedapps.settings.config import declared, defaults, listed, override

SETTINGS = declared()
NUMBERS = {k: v for k, v in defaults().items() if type(v) in (int, float)}
NAMED = ["method", "dataset", "partition", "model"]  # texts that a table knows, checked later
WRONG = [math.nan, math.inf, -math.inf, 1e300, -1e300, 10**23, -(10**23), 2**63, -1000]
MARKUP = ["[/red]", "[bold", "[/]", "a[red]b[/blue]", "\\[", "[link=x]", "]", "${x}", "%s", "{0}"]


def test_an_interval_by_its_ends():
    """(0, 1] leaves 0 out and takes 1; a whole end is exact where a float would be rounded."""
    one = Interval.parse("(0, 1]")
    assert [value in one for value in (0, 1e-300, 1.0, 1.0000001, math.nan)] == [
        False, True, True, False, False,
    ]  # fmt: skip
    assert 2**63 - 1 in Interval.parse(SETTINGS["seed"].values)
    assert 2**63 not in Interval.parse(SETTINGS["seed"].values)


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_range(key):
    assert SETTINGS[key].values, f"{key} has no range where it is declared"


def outside(key):
    """Numbers that the key must not have, of its own kind or of another."""
    held = Interval.parse(SETTINGS[key].values)
    drawn = st.one_of(st.sampled_from(WRONG), st.integers(), st.floats())
    return drawn.filter(lambda value: value not in held)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(NUMBERS)), data=st.data())
def test_what_is_out_of_range_is_refused_in_one_sentence(key, data):
    value = data.draw(outside(key))
    with pytest.raises(ValueError, match="must") as error:
        override(defaults(), {key: value})
    assert str(error.value).startswith(f"{key} is ")
    assert "\n" not in str(error.value)


def toml(value):
    return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan" if value != value else repr(value))


KEYS = st.sampled_from(sorted(defaults()))
TEXT = st.one_of(st.sampled_from(MARKUP), st.text(min_size=1))
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
ANY = st.one_of(st.sampled_from(MARKUP), PLAIN)


@st.composite
def wrong_number(draw):
    key = draw(st.sampled_from(sorted(NUMBERS)))
    return [f"{key}={toml(draw(outside(key)))}"]


@st.composite
def wrong_kind(draw):
    key = draw(KEYS)
    if isinstance(defaults()[key], str):
        numbers = [] if listed(key) else ["3", "1.5"]  # a list may be of one number
        wrong = ["true", "1979-05-27", "[1]", "{}", *numbers]
        return [f"{key}={draw(st.sampled_from(wrong))}"]
    return [f"{key}={draw(st.sampled_from(MARKUP))}"]


@st.composite
def wrong_choice(draw):
    """A name that no table has; the mark makes sure of it."""
    texts = [key for key, one in SETTINGS.items() if isinstance(one.values, tuple)]
    key = draw(st.sampled_from(sorted(texts + NAMED)))
    name = draw(ANY).replace(",", "").replace("=", "")
    return [f"{key}='?{name.replace(chr(39), '')}'"]


@st.composite
def wrong_option(draw):
    option, values = draw(
        st.sampled_from(
            [
                ("--methods", [",", ", ,", "fedavg,fedavg", "tent lr", "tent lr=nan", *MARKUP]),
                ("--seeds", [",", "0,0", "-1", "1.5", "²", str(2**63), "nan", *MARKUP]),
                ("--jobs", ["0", "-1", str(10**12)]),
                ("--gpus-per-client", ["nan", "inf", "-1", "1e9"]),
                ("--engine", MARKUP),
                ("--output", ["/dev/null/out", "/proc/out", "/" + "x" * 300 + "/" + "y" * 300]),
                ("--from", ["/dev/null", "/nowhere", *MARKUP]),
            ]
        )
    )
    return [option, draw(st.sampled_from(values))]


@st.composite
def wrong_words(draw):
    word = draw(ANY)
    return ["--", word if not word.startswith("=") and "=" not in word else f"no-such-key={word}"]


FILES = st.sampled_from(
    [
        b"methods = 3", b"methods = []", b"seeds = []", b"methods = [[1]]", b"seeds = 1.5",
        b"batch-size = 1979-05-27", b"lr = nan", b"[lr]\nx = 1", b"= 3", b"[[", b"\xff",
        b"[" * 5000,
        b"evaluate-every = 99999999999999999999999", b"method = '[/red]'", b"nonsense = 1",
        b"[tent]\nadapt-steps = 0.5", b"published = 3\nlr = -1", b"seeds = [0, 0]",
    ]
)  # fmt: skip


@settings(
    max_examples=200,
    deadline=None,
    phases=[Phase.generate],  # what fails is short already
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.one_of(wrong_number(), wrong_kind(), wrong_choice(), wrong_option(), wrong_words(), FILES)
)
def test_wrong_configurations_start_nothing(tmp_path, wrong):
    """Two hundred of them, others each time: exit code 2, one sentence, no traceback, no folder."""
    if isinstance(wrong, bytes):
        (tmp_path / "mine.toml").write_bytes(wrong)
        wrong = [str(tmp_path / "mine.toml")]
    options = ["--engine", "in-process", "--output", str(tmp_path / "out"), "--yes"]
    said = CliRunner().invoke(COMMAND, ["run", *options, "num-clients=6", "rounds=1", *wrong])
    assert said.exit_code == 2, (wrong, said.output, said.exception)
    assert isinstance(said.exception, SystemExit)
    assert "Traceback" not in said.output
    assert not (tmp_path / "out").exists()
