import numpy as np
import pytest

from strategies.maths.som import (
    best_matching,
    decayed,
    federated_step,
    grid,
    neighbourhood,
    step,
    successors,
)


def test_grid_is_as_square_as_the_count_allows():
    """6 = 2 × 3, 7 = 1 × 7, 9 = 3 × 3."""
    assert grid(6).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid(7)[:, 0].tolist() == [0] * 7
    assert grid(9)[-1].tolist() == [2, 2]


def test_the_decay_by_hand():
    """0.5 · (0.02 / 0.5)^½ = 0.5 · 0.2 = 0.1."""
    assert decayed(0.5, 0.02, 0) == 0.5
    assert decayed(0.5, 0.02, 0.5) == pytest.approx(0.1)
    assert decayed(0.5, 0.02, 1) == pytest.approx(0.02)


def test_neighbourhood_is_a_gaussian_on_the_grid():
    """Distances 1 and 2 at radius 1: e^(−1/2) = 0.60653, e^(−2) = 0.13534."""
    h = neighbourhood(grid(3), 1.0)
    assert h[0] == pytest.approx([1, 0.60653, 0.13534], abs=1e-5)
    assert pytest.approx(h) == h.T


def test_best_matching_is_the_nearest_node():
    nodes = np.array([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]])
    values = np.array([[0.4, 0.0], [0.6, 0.0], [9.0, 9.0]])
    assert best_matching(values, nodes).tolist() == [0, 2, 1]


def test_step_pulls_every_node_by_its_nearness_to_the_best_one():
    """v = (4, 0): node 1 at (2, 0) is best; pulls 0.5 and 0.25 of (v − m): (1, 0) and (3, 0)."""
    nodes = np.array([[0.0, 0.0], [2.0, 0.0]])
    pull = np.array([[0.5, 0.25], [0.25, 0.5]])
    assert step(nodes, np.array([4.0, 0.0]), pull).tolist() == [[1, 0], [3, 0]]


def test_federated_step_takes_for_each_node_the_best_scoring_users_update():
    """User 1 scores best at node 0, user 0 at node 1; the other halves are ignored."""
    nodes = np.zeros((2, 1))
    updates = [np.array([[1.0], [2.0]]), np.array([[10.0], [20.0]])]
    scores = [np.array([-5.0, -1.0]), np.array([-4.0, -3.0])]
    assert federated_step(nodes, updates, scores).tolist() == [[10], [2]]


def test_successors_overlap_most_in_total():
    """Old 0 shares 5 users with new 1 and 4 with new 0, old 1 shares 4 with new 1 and none with
    new 0: staying keeps 4 + 4 users, changing 5 + 0."""
    assert successors(np.array([[4, 5], [0, 4]])).tolist() == [0, 1]
    assert successors(np.array([[1, 7], [2, 4]])).tolist() == [1, 0]
    in_a_circle = [[1, 5, 0], [0, 1, 6], [7, 0, 1]]  # old 0's users are new 1's, old 1's new 2's
    assert successors(np.array(in_a_circle)).tolist() == [1, 2, 0]


def test_nodes_without_users_stay_in_place():
    assert successors(np.zeros((4, 4), int)).tolist() == [0, 1, 2, 3]
    overlap = np.zeros((4, 4), int)
    overlap[0, 2] = 3
    assert successors(overlap)[[0, 1, 3]].tolist() == [2, 1, 3]
