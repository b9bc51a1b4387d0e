"""Features of images (MobileNetV2, 1280) and texts (BERT, 768), computed once (ODPFL-HN, 6.4, 6.6).

Weights come from `<data-dir>/weights`: torchvision's `mobilenet_v2-b0353104.pth`, and a folder
`bert-base-uncased` as transformers saves it. Otherwise they come from torchvision's server
and the Hugging Face hub. The datasets that hold the results are cached by `partitions.cache`."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from PIL.Image import Image

MOBILENET, BERT = "mobilenet_v2-b0353104.pth", "bert-base-uncased"
TOKENS = 128  # of a text, the rest is cut off (ours)
BATCH = 64


def mobilenet_v2(images: "Iterable[Image]", count: int, data_dir: Path) -> np.ndarray:
    """float32 (count, 1280): the input of MobileNetV2's classifier, ImageNet weights."""
    from torchvision.models import MobileNet_V2_Weights

    network = mobilenet_network(data_dir)
    transform = MobileNet_V2_Weights.IMAGENET1K_V1.transforms()

    def encode(batch: "Sequence[Image]") -> Tensor:
        maps = network.features(torch.stack([transform(image) for image in batch]))
        return maps.mean((2, 3))

    return _extract(encode, images, count, 1280)


def mobilenet_network(data_dir: Path) -> Any:
    """MobileNetV2 in evaluation mode. ValueError if its weights are damaged or missing."""
    from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

    file = data_dir / "weights" / MOBILENET
    if not file.is_file():
        try:
            return mobilenet_v2(weights=MobileNet_V2_Weights.IMAGENET1K_V1).eval()
        except OSError as error:
            raise ValueError(
                f"MobileNetV2's weights are neither at {file} nor to download"
            ) from error
    digits = MOBILENET.removesuffix(".pth").rpartition("-")[2]
    if not hashlib.sha256(file.read_bytes()).hexdigest().startswith(digits):
        raise ValueError(f"{file} is truncated or not torchvision's: its SHA-256 is not {digits}…")
    network = mobilenet_v2()
    network.load_state_dict(torch.load(file, weights_only=True))
    return network.eval()


def bert(texts: Sequence[str], data_dir: Path) -> np.ndarray:
    """float32 (n, 768): the last hidden state at the first token, [CLS] (ours)."""
    tokenizer, network = bert_network(data_dir)

    def encode(batch: Sequence[str]) -> Tensor:
        tokens = tokenizer(
            list(batch), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        return network(**tokens).last_hidden_state[:, 0]

    return _extract(encode, texts, len(texts), 768)


def bert_network(data_dir: Path) -> tuple[Callable[..., Any], nn.Module]:
    """Tokenizer and encoder in evaluation mode. Raises ImportError that says what to
    install, and ValueError if its weights are missing."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ImportError("BERT features need transformers: pip install 'fedapps[text]'") from error
    folder = data_dir / "weights" / BERT
    source = str(folder) if folder.is_dir() else f"google-bert/{BERT}"
    try:
        return AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source).eval()
    except OSError as error:
        raise ValueError(f"BERT's weights are neither in {folder} nor at the hub") from error


@torch.inference_mode()
def _extract(
    encode: Callable[[Any], Tensor], items: Iterable[Any], count: int, width: int
) -> np.ndarray:
    """Features of all items in batches, with a progress bar."""
    from rich.progress import track

    features = np.empty((count, width), np.float32)
    left = iter(items)
    batches: Iterator[tuple[Any, ...]] = iter(lambda: tuple(islice(left, BATCH)), ())
    for number, batch in enumerate(track(batches, "features", total=-(-count // BATCH))):
        rows = encode(batch)
        features[number * BATCH : number * BATCH + len(rows)] = rows.numpy()
    return features
