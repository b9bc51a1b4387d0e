"""What a served client goes on from when further inputs arrive."""

from collections.abc import Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from clients.core.arrays import Arrays, as_known_type, to_numpy, to_tensors
from clients.core.client import Client
from fedapps.building import Builder
from fedapps.common.external_code import Value
from fedapps.common.settings import taken
from fedapps.methods import METHODS
from fedapps.results.card import Card
from fedapps.results.schema import Count, mismatch
from fedapps.saved import parse_state, state_bytes
from fedapps.settings.config import Config, accepted, check_method, defaults, override
from partitions.shares import Share

FILE = "stream.safetensors"
_TYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)}
CLIENT = 0  # id of every novel client in its random draws: equal data give equal predictions


@dataclass(frozen=True, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
class Stream:
    """The settings of a client and its network, the server's message (numbers, and arrays `sent`),
    what the updates so far have `left`, their number, and the digest of the first inputs.

    `types` names the types of the tensors left whose type numpy lacks, such as bfloat16."""

    config: dict[str, Value]
    message: dict[str, bool | int | float]
    sent: dict[str, np.ndarray]
    left: dict[str, np.ndarray]
    data: str
    updates: Count = 0
    types: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begun(
        cls, client: Client, config: Config, message: Mapping[str, Any], sent: Arrays, data: str
    ) -> Self:
        """That of a client which has served its first inputs."""
        method = str(message["method"])
        model = client.model_name
        names = {*accepted(type(client)), *taken(client.build)}
        kept: Config = {"model": model}
        # What builds the client again: options of its network, and settings that it reads.
        for key, value in config.items():
            section, _, name = key.rpartition(".")
            is_read = section in ("", method) and name.replace("-", "_") in names
            if section == model or is_read:
                kept[key] = value
        numbers = {key: v for key, v in message.items() if isinstance(v, int | float)}
        return cls(kept, numbers, sent, to_numpy(client.stream), data, types=_types(client.stream))

    def after(self, client: Client) -> Self:
        """That after one more update of the client."""
        left = to_numpy(client.stream)
        types = _types(client.stream)
        return replace(self, left=left, updates=self.updates + 1, types=types)

    def client(self, card: Card, share: Share) -> Client:
        """The client, which now holds further inputs."""
        config = override(defaults(), self.config, all_methods=False)
        builder = Builder(config, check_method(card.method), card.info())
        client = builder.client(share, CLIENT)
        client.stream = to_tensors(self.left, client.device)
        for name, type_name in self.types.items():
            client.stream[name] = client.stream[name].to(_TYPES[type_name])
        return client

    def content(self) -> bytes:
        """The content of the stream's file."""
        return state_bytes(asdict(self))

    @classmethod
    def parse(cls, file: Path, data: bytes) -> Self:
        """The stream in the content of a file. Raises ValueError if it is damaged."""
        try:
            return cls(**parse_state(data))
        except ValidationError as error:
            raise ValueError(f"{file} is damaged: {mismatch(error)}") from error


def _types(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of the types that numpy lacks."""
    types = {}
    for name, tensor in tensors.items():
        if as_known_type(tensor).dtype != tensor.dtype:
            types[name] = str(tensor.dtype)
    return types


def cannot_go_on(method: str, folder: Path | None = None) -> ValueError:
    """The error of a method, or of its settings, without updates; of a delivered model's `folder`
    what gives the model instead."""
    able = ", ".join(name for name, entry in METHODS.items() if entry.client.supports_streaming)
    instead = "personalize further inputs by themselves"
    if folder is not None:
        instead = (
            f"{folder} is no start for updates. Its run gives the model, for any inputs x: "
            "fedapps.load(RUN).personalize(x)"
        )
    return ValueError(
        f"with its settings {method} adapts to each batch of inputs alone, or not at all; "
        f"{instead}. Methods whose models go on: {able}"
    )
