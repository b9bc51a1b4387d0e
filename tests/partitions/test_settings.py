"""Settings declared on a class: defaults, inheritance, ranges."""

import inspect
import json

import pytest

from fedapps.common.settings import Configured, Setting, setting, taken


class Stepping(Configured):
    steps = setting(10, "steps", "[0, 100]")
    rate = setting(0.5, "learning rate", "(0, 1]")
    mode = setting("auto", "how", ("auto", "all"))
    bits = setting(False, "in bits")


class Patient(Stepping):
    steps = 50


class Naming(Patient):
    label = setting("", "a text of any kind")

    def __init__(self, first, *, other=3, **settings):
        super().__init__(**settings)
        self.first, self.other = first, other


def values(one):
    return (one.steps, one.rate, one.mode, one.bits)


def test_a_class_reads_as_its_defaults_and_an_object_as_what_it_was_given():
    assert values(Stepping) == values(Stepping()) == (10, 0.5, "auto", False)
    one = Stepping(steps=7, rate=1, mode="all", bits=True)
    assert values(one) == (7, 1.0, "all", True)
    assert type(one.rate) is float
    assert values(Stepping()) == (10, 0.5, "auto", False)  # another object's are none of this one's


def test_a_plain_value_replaces_the_default_and_keeps_the_rest():
    """Not the parent's default; a grandchild's is the child's, by the same range and meaning."""
    assert (Stepping.steps, Patient.steps, Naming.steps) == (10, 50, 50)
    assert Naming.declared["steps"].meaning == "steps"
    assert [*Naming.declared] == ["steps", "rate", "mode", "bits", "label"]
    with pytest.raises(ValueError, match=r"steps is 101; it must lie in \[0, 100\]"):
        Naming("a", steps=101)


def test_the_next_class_in_the_resolution_order_decides():
    class Fast(Stepping):
        rate = 1.0

    class Both(Fast, Patient):
        pass

    assert values(Both) == (50, 1.0, "auto", False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rate": 0.0}, r"rate is 0.0; it must lie in \(0, 1\]"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"steps": 1.0}, "steps is 1.0; it must be a whole number"),
        ({"steps": True}, "steps is True; it must be a whole number"),
        ({"mode": "best"}, "unknown mode 'best'; known: auto, all"),
        ({"bits": 1}, "bits is 1; it must be true or false"),
    ],
)
def test_what_is_out_of_range_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Stepping(**given)


def test_a_text_is_one_line_of_bounded_length():
    for text in ("a\nb", 5000 * "a"):
        with pytest.raises(ValueError, match="one line of at most 4096"):
            Naming("a", label=text)


def test_a_setting_that_is_not_declared_is_named_with_those_that_are():
    with pytest.raises(TypeError, match="Stepping has no setting 'step'; it has bits, mode, rate"):
        Stepping(step=1)


def test_a_default_out_of_its_own_range_cannot_be_declared():
    with pytest.raises(ValueError, match="must lie in"):
        setting(2.0, "too much", "[0, 1]")
    with pytest.raises(ValueError, match="is no interval"):
        setting(2.0, "no interval", "0..1")
    with pytest.raises(ValueError, match="steps is -1"):
        type("Wrong", (Stepping,), {"steps": -1})


@pytest.mark.parametrize(
    "declared",
    [
        *Stepping.declared.values(),
        Setting(0.5, "open", "(0, 0.5]"),
        Setting(1, "huge", "[0, 9223372036854775807]"),
        Setting("a,b", "names", listed=True),
    ],
)
def test_a_setting_is_the_same_read_from_its_schema(declared):
    assert Setting.from_schema(json.loads(json.dumps(declared.schema()))) == declared


def test_a_list_may_be_of_one_number():
    assert Setting("0,30", "angles", listed=True).checked("angles", 15) == "15"


def test_the_signature_shows_arguments_and_settings():
    parameters = inspect.signature(Naming).parameters
    assert [*parameters] == ["first", "other", "steps", "rate", "mode", "bits", "label"]
    assert parameters["steps"].default == 50
    assert [*taken(Naming)] == [*parameters][1:]
