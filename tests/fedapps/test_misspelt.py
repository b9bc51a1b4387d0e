"""A class or a `Method` of one's own whose declarations would be ignored is refused by name."""

import pytest
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

from clients.core.client import Client
from fedapps.callbacks import Callback
from fedapps.common.settings import setting
from fedapps.methods import METHODS, Method
from fedapps.settings.sections import of_method
from partitions.rules.partitioner import RowsPartitioner
from strategies.methods.fedavg import FedAvg

TEXTS = ("a paper", "one line", "global")


def nothing(self, *arguments):
    return arguments


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (FedAvg, "agregate", "aggregate"),
        (FedAvg, "brodcast", "broadcast"),
        (FedAvg, "initialise", "initialize"),
        (FedAvg, "personalise", "personalize"),
        (Client, "recieve", "receive"),
        (Client, "is_personel", "is_personal"),
        (Callback, "round_end", "round_ends"),
        (RowsPartitioner, "attribute", "attributes"),
    ],
)
def test_a_misspelt_hook_is_refused(base, name, meant):
    """It would run the base's hook under the class's own name."""
    with pytest.raises(TypeError, match=f"Mine defines '{name}', .* did you mean '{meant}'"):
        type("Mine", (base,), {name: nothing})


@pytest.mark.parametrize(
    ("name", "meant"), [("local_step", "local_steps"), ("persnal", "personal")]
)
def test_a_misspelt_declaration_is_refused(name, meant):
    with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
        type("Mine", (Client,), {name: 3})


@pytest.mark.parametrize(
    ("base", "former", "present"),
    [
        (FedAvg, "kept", "persistent_attributes"),
        (FedAvg, "reports_last", "report_last_round"),
        (Client, "has_global", "also_scores_global_model"),
        (Client, "stacked", "vmapped_tensors"),
        (Client, "adapted", "adaptation_metrics"),
    ],
)
def test_a_former_name_is_refused_with_the_present_one(base, former, present):
    """The base no longer reads it."""
    with pytest.raises(TypeError, match=f"{former!r}, which is now called {present!r}"):
        type("Mine", (base,), {former: ("h",)})


def test_a_former_attribute_of_an_object_is_refused():
    """A client writes it while it predicts; the numbers would be lost."""
    client = Client.__new__(Client)
    with pytest.raises(AttributeError, match="'adapted' is now called 'adaptation_metrics'"):
        client.adapted = {"steps": 2}


def test_other_names_are_free():
    """Private ones, declared settings, and those far from any of the base's."""

    class Base(FedAvg):
        rounds_of = (1, 2)

    class Mine(Base):
        rounds_of = (3,)  # no texts: those of the base are none
        aggregates = setting(1, "how many")
        _agregate = 1
        momentum_buffer = ()

        def helper(self):
            return self.aggregates

    assert Mine(aggregates=2).helper() == 2


@pytest.mark.parametrize(
    ("base", "name", "value", "wanted"),
    [
        (Client, "needs_head", "yes", "a bool"),
        (Client, "personal", "head.", "a tuple of texts, such as"),
        (Client, "exchanges", ["query.more"], "a tuple of texts"),
        (Client, "train", 5, "a method"),
        (Client, "build", nothing, "a class method"),
        (Client, "lr", None, "a setting: give it a value"),
        (FedAvg, "in_place", 1, "a bool"),
    ],
)
def test_a_declaration_has_the_type_of_the_bases(base, name, value, wanted):
    with pytest.raises(TypeError, match=f"Mine sets '{name}' to .*{wanted}"):
        type("Mine", (base,), {name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"novel": "yes"}, "novel of a Method is 'yes'; it must be one of '', 'global', 'adapted'"),
        ({"strategy": FlowersFedAvg}, "subclass of strategies.core.strategy.PersonalizedStrategy"),
        ({"client": FedAvg}, "subclass of clients.core.client.Client"),
        ({"dp": "local"}, "dp .* a tuple of texts"),
        ({"dp": ("locally",)}, "dp of a Method is 'locally'"),
        ({"relative_cost": "2"}, "relative_cost .* a number above 0"),
        ({"settings": ("lr", 0.1)}, "settings .* a dict"),
        ({"hidden_settings": "bits"}, "hidden_settings .* a tuple"),
        ({"paper": 2026}, "paper .* a text"),
    ],
)
def test_declarations_of_a_method_are_checked(changes, message):
    given = {"strategy": FedAvg, "client": Client, "paper": "p", "summary": "s"} | changes
    with pytest.raises(ValueError, match=message):
        Method(**given)


def test_settings_of_a_method_are_checked():
    for changes, message in (
        ({"settings": {"lr": "fast"}}, "lr of mine is 'fast'; it must be a number"),
        ({"settings": {"momentum": 2.0}}, "momentum of mine is 2.0; it must lie in"),
        ({"hidden_settings": ("bitz",)}, "mine hides 'bitz'"),
    ):
        with pytest.raises(ValueError, match=message):
            of_method("mine", Method(FedAvg, Client, *TEXTS, **changes))
    for name, method in METHODS.items():
        of_method(name, method)
