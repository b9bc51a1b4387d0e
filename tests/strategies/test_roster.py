"""The roster: ids, roles and models are kept, and a node that lies is refused alone."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.core.protocol import CAPABILITIES
from fedapps.engines.in_process_grid import InProcessGrid
from strategies import ODPFLHN
from strategies.core.roster import NoClientStartsError, Roster


def federation(*got):
    """A grid of our clients, whose nodes 1, 2, … report `got[0]`, `got[1]`, …, and the list, to be
    changed. One that is an exception cannot start."""
    words = list(got)
    client_app = ClientApp()

    @client_app.query()
    def query(message, context):
        said = words[context.node_id - 1]
        if isinstance(said, Exception):
            said = {"error": f"{type(said).__name__}: {said}"}
        got = ConfigRecord({CAPABILITIES: ""} | said)
        return Message(RecordDict({"properties": got}), reply_to=message)

    return InProcessGrid.simulation(client_app, {}, len(words)), words


def look(roster, grid, *ids):
    """(client, node) of those present when only the nodes `ids` are connected; what is refused."""
    grid.get_node_ids = lambda: ids
    nodes = roster.present(grid, {}, 1.0)
    return [(node.client, node.id) for node in nodes], dict(roster.refused)


def test_of_two_nodes_with_one_id_the_first_stays_until_it_leaves():
    grid, _ = federation({"client": 7}, {"client": 7}, {"client": 5})
    roster = Roster(3, 0.0, "")
    assert look(roster, grid, 1, 2, 3) == ([(5, 3), (7, 1)], {"identity": 1})
    assert look(roster, grid, 1, 2, 3) == ([(5, 3), (7, 1)], {})  # counted once
    roster.least = 2
    assert look(roster, grid, 2, 3) == ([(5, 3), (7, 2)], {})
    assert look(roster, grid, 1, 2, 3) == ([(5, 3), (7, 1)], {"identity": 1})


def test_a_range_of_nodes_that_changes_is_noticed(monkeypatch):
    """A range whose nodes are all present is not gone through again."""
    grid, _ = federation({"client": 7}, {"client": 6}, {"client": 5})
    roster = Roster(1, 0.0, "")
    for start, stop in ((1, 3), (1, 4), (2, 4), (2, 4), (1, 4), (1, 3)):
        ids = range(start, stop)
        monkeypatch.setattr(grid, "get_node_ids", lambda ids=ids: ids)
        nodes = roster.present(grid, {}, 1.0)
        assert sorted(node.id for node in nodes) == list(ids)


def test_a_node_without_a_client_id_gives_way_to_one_that_has_it():
    """Node 1 gives no client id and would be client 1, which is the id that node 2 gives."""
    grid, _ = federation({}, {"client": 1}, {"client": 0})
    assert look(Roster(3, 0.0, ""), grid, 1, 2, 3) == ([(0, 3), (1, 2)], {"identity": 1})


def test_who_comes_back_as_another_is_refused_from_then_on():
    for change in ({"client": 8}, {"novel": True}, {"model": "big"}):
        first = {"client": 7, "novel": False, "model": "small"}
        grid, words = federation({"client": 3}, dict(first))
        roster = Roster(1, 0.0, "")
        assert look(roster, grid, 1, 2) == ([(3, 1), (7, 2)], {})
        look(roster, grid, 1)
        words[1] |= change
        assert look(roster, grid, 1, 2) == ([(3, 1)], {"identity": 1})
        look(roster, grid, 1)
        words[1] = first  # too late
        assert look(roster, grid, 1, 2) == ([(3, 1)], {})


def test_another_node_cannot_make_a_novel_client_a_training_one():
    grid, _ = federation({"client": 3}, {"client": 7, "novel": True}, {"client": 7})
    roster = Roster(1, 0.0, "")
    look(roster, grid, 1, 2)
    assert look(roster, grid, 1, 3) == ([(3, 1)], {"identity": 1})


def test_a_restarted_node_goes_on_under_a_new_id():
    grid, _ = federation({"client": 3}, {"client": 7}, {"client": 7})
    roster = Roster(1, 0.0, "")
    look(roster, grid, 1, 2)
    assert look(roster, grid, 1, 3) == ([(3, 1), (7, 3)], {})


def test_what_is_no_answer_costs_that_node_alone():
    bad = [{"client": "7"}, {"client": float("nan")}, {"client": [1]}, {"client": True},
           {"client": 6, "novel": "no"}, {"client": -1}, {"client": 6, "classes": float("inf")},
           OSError("no such disk")]  # fmt: skip
    grid, words = federation({"client": 3}, *bad)
    roster = Roster(9, 0.0, "")
    everyone = range(1, 10)
    assert look(roster, grid, *everyone) == ([(3, 1)], {"malformed": 7, "error": 1})
    words[8] = {"client": 9}  # it is asked again
    assert look(roster, grid, *everyone) == ([(3, 1), (9, 9)], {})


def test_nodes_at_the_start_have_longer_to_answer():
    """90 s, if that is longer than the round's timeout, which later ones have."""
    grid, _ = federation({"client": 1}, {"client": 2}, {"client": 3})
    answers, waited = grid.send_and_receive, []

    def noted(messages, timeout):
        waited.append(timeout)
        return answers(messages, timeout=timeout)

    grid.send_and_receive = noted
    for start_timeout in (90.0, 0.5):
        roster = Roster(1, 0.0, "", start_timeout=start_timeout)
        for ids in ((1,), (1, 2), (1, 2, 3)):
            look(roster, grid, *ids)
    assert waited == [90.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_nodes_that_come_while_others_answer_are_asked_after_the_wait_has_ended():
    """Nodes 2 and 3 come one after the other, while the ones before them answer."""
    grid, _ = federation({"client": 1}, {"client": 2}, {"client": 3})
    come = [1]
    answer = grid.send_and_receive

    def slowly(messages, timeout):
        come.append(len(come) + 1)
        return answer(messages, timeout=timeout)

    grid.send_and_receive = slowly
    grid.get_node_ids = lambda: come[:3]
    assert [node.id for node in Roster(3, 0.0, "").present(grid, {}, 1.0)] == [1, 2, 3]
    come[:] = [1]
    with pytest.raises(RuntimeError, match="3 of 4 nodes answered within 0 s"):
        Roster(4, 0.0, "").present(grid, {}, 1.0)


def test_the_roster_is_cut_to_one_network():
    grid, _ = federation(*({"client": i, "model": "ab"[i % 2]} for i in (1, 2, 3)))
    assert look(Roster(3, 0.0, "b"), grid, 1, 2, 3) == ([(1, 1), (3, 3)], {})


def test_nodes_are_asked_in_batches(monkeypatch):
    """Of two at once: node 1, which gives no client id, still gives way to node 3."""
    monkeypatch.setattr("strategies.core.roster.ASKED_AT_ONCE", 2)
    grid, _ = federation({}, {"client": 7}, {"client": 1}, {"client": 4}, {"client": 0})
    answers, asked = grid.send_and_receive, []

    def noted(messages, timeout):
        asked.append([message.metadata.dst_node_id for message in messages])
        return answers(messages, timeout=timeout)

    grid.send_and_receive = noted
    found = look(Roster(5, 0.0, ""), grid, *range(1, 6))
    assert found == ([(0, 5), (1, 3), (4, 4), (7, 2)], {"identity": 1})
    assert asked == [[1, 2], [3, 4], [5]]


def test_nodes_with_equal_properties_share_them():
    """They differ in their ids alone; a hundred thousand nodes then take little memory."""
    grid, _ = federation(*({"client": i, "num-examples": 20 + i // 3} for i in range(4)))
    first, second, third, other = Roster(4, 0.0, "").present(grid, {}, 1.0)
    assert first.properties == {CAPABILITIES: "", "num-examples": 20}
    assert first.properties is second.properties is third.properties
    assert other.properties == {CAPABILITIES: "", "num-examples": 21}


def test_the_list_of_nodes_is_made_again_when_nodes_join_or_leave():
    grid, _ = federation({"client": 7}, {"client": 5}, {"client": 6})
    roster = Roster(1, 0.0, "")
    first = roster.present(grid, {}, 1.0)
    assert roster.present(grid, {}, 1.0) is first
    assert look(roster, grid, 2, 3) == ([(5, 2), (6, 3)], {})
    assert look(roster, grid, 1, 2, 3) == ([(5, 2), (6, 3), (7, 1)], {})


def test_that_every_node_is_refused_is_an_error_of_its_own():
    """Of one that cannot start, and of one that lacks what the strategy needs."""
    grid, _ = federation(OSError("no data"))
    with pytest.raises(NoClientStartsError, match=r"no client could start; .*no data"):
        look(Roster(1, 0.0, ""), grid, 1)
    grid, _ = federation({"client": 1})
    roster = Roster(1, 0.0, "", requires=ODPFLHN.requires, strategy="ODPFLHN")
    with pytest.raises(NoClientStartsError, match=r"^ODPFLHN needs clients that"):
        look(roster, grid, 1)
    with pytest.raises(RuntimeError, match="0 of 1 nodes answered") as nobody:
        look(Roster(1, 0.0, ""), grid)
    assert not isinstance(nobody.value, NoClientStartsError)
