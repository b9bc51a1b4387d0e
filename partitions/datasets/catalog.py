"""name → what is known of a dataset without its files.

The table can be read without torch; what reads or makes a dataset is imported when it is used."""

import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedapps.common.tasks import BINARY, CLASSES, LABELS, VALUES
from partitions.datasets.description import (
    BY_CHARACTER,
    BY_WORD,
    IMAGE,
    SIGNAL,
    TOKENS,
    Description,
)
from partitions.datasets.readers.raw import Raw
from partitions.datasets.words import CHARACTERS as CHARACTERS_OF_PLAYS
from partitions.datasets.words import (
    LINE_LENGTH,
    NUM_WORD_TOKENS,
    TWEET_LENGTH,
    names_of_characters,
)

Moment = float | tuple[float, ...]  # a mean or a deviation: one number, or one for each channel


@dataclass(frozen=True)
class Info:
    """The facts of a dataset; `shape` is that of one input.

    `read` gives the samples in a folder of the official files, or None if there are none; `make`
    gives them without files. Both are functions, or the ``module:NAME`` of one."""

    name: str
    shape: tuple[int, ...]
    num_classes: int
    summary: str
    hub: str = ""  # canonical name on the hub
    read: Callable[[Path], Raw | None] | str = field(default="", compare=False, repr=False)
    make: Callable[[], Raw] | str = field(default="", compare=False, repr=False)
    scale: float = 255.0  # largest value of an input as stored
    classes: tuple[str, ...] = ()  # names, as far as they are known without the files
    columns: tuple[str, ...] = ()  # natural columns
    num_types: int = 0  # kinds of inputs that users may prefer, if labels are preferences
    files: str = ""  # the official files, for people
    mean: Moment = 0.0  # customary constants of inputs in [0, 1], by channel
    std: Moment = 0.0  # 0: there are none
    task: str = CLASSES  # what the labels mean
    inputs: Description | None = None  # of tokens and of a user's own data: what an input is
    num_tokens: int = 0  # of tokens: all are below it
    clients_words: bool = False  # the tokens are the training clients' most frequent words
    owner: str = ""  # the natural column whose values own data's format says to be the clients

    @property
    def num_outputs(self) -> int:
        """The number of a network's outputs. `num_classes` is that of labels or of values, where
        the task is one of these."""
        return 1 if self.task == BINARY else self.num_classes

    @property
    def labels_text(self) -> str:
        """What the labels are, for people."""
        count = self.num_classes
        if self.task == LABELS:
            return f"{count} labels, several at once"
        if self.task == VALUES:
            return f"{count} value{'s' * (count > 1)} to predict (regression)"
        return f"{count} classes"

    @property
    def inputs_text(self) -> str:
        """What an input is, for people."""
        kind = IMAGE if self.inputs is None else self.inputs.kind
        if kind == TOKENS:
            by_character = self.inputs is not None and self.inputs.texts == BY_CHARACTER
            return f"{self.shape[0]} {'characters' if by_character else 'tokens'} each"
        if len(self.shape) == 1:
            return f"vectors of {self.shape[0]} columns"
        channels = f"{self.shape[0]} channel{'s' * (self.shape[0] > 1)}"
        if kind == SIGNAL:
            return f"signals of {channels} and {self.shape[1]} steps"
        return f"images of {channels} and {'×'.join(map(str, self.shape[1:]))} pixels"


CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
TOPICS = (
    *("Society & Culture", "Science & Mathematics", "Health", "Education & Reference"),
    *("Computers & Internet", "Sports", "Business & Finance", "Entertainment & Music"),
    *("Family & Relationships", "Politics & Government"),
)
_READ = "partitions.datasets.readers."
_IDX = "{train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz"
_LEAF = "LEAF's {train,test}/*.json, here or in data/ (preprocess.sh -t sample)"
SENTIMENTS = ("negative", "positive")
_CLOTHING = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_OBJECTS = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_ANIMALS = (*("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"),)
DATASETS = {
    entry.name: entry
    for entry in (
        Info("digits", (1, 8, 8), 10, "1 797 digits of scikit-learn, embedded", scale=16.0,
             classes=tuple(string.digits), make=_READ + "digits:read_digits"),
        Info("mnist", (1, 28, 28), 10, "70 000 digits", "ylecun/mnist",
             _READ + "idx:read_mnist", classes=tuple(string.digits), files=_IDX,
             mean=0.1307, std=0.3081),
        Info("fashion-mnist", (1, 28, 28), 10, "70 000 pieces of clothing",
             "zalando-datasets/fashion_mnist", _READ + "idx:read_mnist", classes=_CLOTHING,
             files=_IDX),
        Info("cifar10", (3, 32, 32), 10, "60 000 photographs", "uoft-cs/cifar10",
             _READ + "cifar:read_cifar10", classes=_OBJECTS,
             files="cifar-10-batches-py/ or cifar-10-python.tar.gz",
             mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
        Info("cifar100", (3, 32, 32), 100, "60 000 photographs, 20 superclasses",
             "uoft-cs/cifar100", _READ + "cifar:read_cifar100", columns=("coarse",),
             files="cifar-100-python/ or cifar-100-python.tar.gz",
             mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761)),
        Info("femnist", (1, 28, 28), 62, "characters by writer (LEAF)", "flwrlabs/femnist",
             _READ + "femnist:read_femnist", classes=CHARACTERS, columns=("writer",),
             files="LEAF's {train,test}/*.json, or emnist-byclass-*-ubyte[.gz] without writers",
             mean=0.1307, std=0.3081),
        Info("shakespeare", (LINE_LENGTH,), len(CHARACTERS_OF_PLAYS),
             "next character of Shakespeare's plays by role (LEAF)",
             read=_READ + "leaf:read_shakespeare", scale=1.0, classes=names_of_characters(),
             columns=("user",), files=_LEAF, inputs=Description(TOKENS, texts=BY_CHARACTER),
             num_tokens=len(CHARACTERS_OF_PLAYS)),
        Info("sent140", (TWEET_LENGTH,), 2, "sentiment of tweets by author (LEAF)",
             read=_READ + "leaf:read_sent140", scale=1.0, classes=SENTIMENTS, columns=("user",),
             files=_LEAF, inputs=Description(TOKENS, texts=BY_WORD),
             num_tokens=NUM_WORD_TOKENS,
             clients_words=True),
        Info("omniglot", (1, 28, 28), 1623, "1 623 characters of 50 alphabets",
             read=_READ + "omniglot:read_omniglot", columns=("alphabet",),
             files="images_background/ and images_evaluation/, or their .zip"),
        Info("stl10", (3, 96, 96), 10, "13 000 photographs, CIFAR-10-like classes",
             read=_READ + "stl10:read_stl10", classes=_ANIMALS,
             files="stl10_binary/ or stl10_binary.tar.gz"),
        Info("inaturalist", (1280,), 1203, "MobileNetV2 features of species by place",
             read=_READ + "federated_vision:read_inaturalist", scale=1.0, columns=("cell",),
             files="federated_train*.csv, test.csv, iNaturalist 2017's images and json"),
        Info("landmarks", (1280,), 2028, "MobileNetV2 features of landmarks by author",
             read=_READ + "federated_vision:read_landmarks", scale=1.0, columns=("author",),
             files="federated_train.csv, test.csv, Landmarks v2's images"),
        Info("yahoo-answers", (768,), 10, "BERT features of questions and answers",
             "community-datasets/yahoo_answers_topics", _READ + "yahoo:read_yahoo", scale=1.0,
             classes=TOPICS, files="train.csv and test.csv"),
        Info("voices", (1, 200, 375), 20, "synthesised speech, 20 voices, spectrograms (FedEmbed)",
             make="partitions.datasets.voices:full_size"),
        Info("voices-small", (1, 40, 75), 20, "voices at a fifth of the resolution",
             make="partitions.datasets.voices:small_size"),
    )
}  # fmt: skip
