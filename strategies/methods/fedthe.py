"""The server of FedTHE (Jiang and Lin, ICLR 2023) and BTFL: FedAvg, and the clients' summaries.

A client's `feature_summary` describes its training features under the model that it got. The server
sends their plain mean with the next model. Departs from FedTHE's code: models are weighted by
sample counts, not equally."""

from dataclasses import replace

from clients.core.arrays import Arrays
from clients.methods._two_heads import SUMMARY
from strategies.core.replies import Update
from strategies.methods.fedavg import FedAvg


class FedTHE(FedAvg):
    """FedAvg, with the plain mean of the clients' summaries, whose size is limited separately."""

    limit_groups = (SUMMARY,)
    uses_late_replies = False  # their summaries describe another model's features

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean model, weighted by sample counts, and the plain mean of the summaries."""
        model = super().aggregate(arrays, updates)
        if SUMMARY not in arrays:  # clients of other packages
            return model
        summaries = []
        for update in updates:
            summaries.append(replace(update, arrays={SUMMARY: update.arrays[SUMMARY]}))
        plain = self.mean({SUMMARY: arrays[SUMMARY]}, summaries, [1.0] * len(updates))
        return model | plain
