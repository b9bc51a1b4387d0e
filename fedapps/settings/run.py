"""The settings of every run, whatever its method and its partition rule."""

from fedapps.common.settings import COUNT, POSITIVE_INT, ROUNDS, SECONDS, Configured, setting
from fedapps.common.tasks import TASKS
from partitions.datasets.description import DECLARED

DAY = "(0, 86400]"
LONGEST_CARD = 2**18  # characters: 10 000 words, packed, take about 60 000


class RunSettings(Configured):
    """The settings of every run, read by the apps and by `partitions`."""

    method = setting("fedavg", "a name of `fedapps list methods`", listed=True)
    dataset = setting("digits", "a name of `fedapps list datasets`")
    data_dir = setting("", "folder that holds <dataset>/; empty: $FEDAPPS_DATA_DIR, then the hub")
    image_size = setting(
        0, "own images: crop and resize to this many pixels a side; 0: unchanged", "[0, 4096]"
    )
    label = setting(
        "",
        "own tables: the label column, or several (a,b); empty: label, class or a similar name",
        listed=True,
    )
    columns = setting(
        "",
        "own tables: the columns of inputs; empty: all but labels, the clients' column and "
        "identifiers",
        listed=True,
    )
    ignore = setting("", "own tables: columns that are no inputs", listed=True)
    missing = setting(
        "refuse",
        "own tables: what an empty cell becomes: mean: the training clients' mean, and a mark in a "
        "column of its own; refuse: an error",
        ("refuse", "mean"),
    )
    skip_broken = setting(
        0.0,
        "own data: share of the images that are broken, or of the rows with gaps, that may be left "
        "out; they are named, and above it the data are refused",
        "[0, 1)",
    )
    task = setting(
        "auto",
        "own data: what the labels mean: classes, binary (two classes, one output), labels "
        "(several at once) or values (regression); auto: the labels decide",
        ("auto", *TASKS),
    )
    scores = setting(
        "",
        'further scores, your own functions of outputs and labels, as "my_lab.metrics:auroc"',
        listed=True,
        evaluation=True,
    )
    inputs = setting(
        "auto",
        "own arrays: what an input is: image, signal (channels, time), tokens (whole numbers for "
        "an embedding) or vector; own texts: what a token is: characters or words; auto: axes, "
        "types and labels decide, where there is one reading",
        ("auto", *DECLARED),
    )
    partition = setting("pathological", "a name of `fedapps list partitions`")
    num_clients = setting(20, "number of clients, training and novel ones together", POSITIVE_INT)
    train_fraction = setting(0.5, "share of the clients that train; the others are novel", "(0, 1]")
    rounds = setting(30, "number of training rounds", ROUNDS)
    model = setting("mlp", "a name of `fedapps list models`")
    head = setting(
        "",
        "own network: dotted name of its last layer, for methods with a head; empty: the linear "
        "layer that gives the outputs",
    )
    client_models = setting(
        "",
        'sizes of `model`, such as "small,medium,big", assigned to clients in turn by client id',
        listed=True,
    )
    restrict_to_model = setting("", "run only the clients that client-models assigns this size")
    standardize = setting(
        "auto",
        "standardize inputs by mean and deviation: none: keep them; training-clients: those of the "
        "training clients' training samples, by column or channel, for images over all pixels; "
        "channels: the dataset's published constants; auto: training-clients for own tables, "
        "vectors and signals, else none",
        ("auto", "none", "training-clients", "channels"),
    )
    data_seed = setting(-1, "seed of the split; -1: use seed", "[-1, 9223372036854775807]")
    novel_shots = setting(
        0,
        "labeled samples per class from which a novel client learns; the others evaluate it",
        COUNT,
        evaluation=True,
    )
    early_stopping = setting(
        0,
        "stop after this many evaluations without a better validation score; 0: never",
        ROUNDS,
    )
    callbacks = setting(
        "", '"tensorboard", "mlflow", "wandb", or your own as "my_lab.hooks:Slack"', listed=True
    )
    output_dir = setting("", "absolute path of the folder for results; empty: write nothing")
    from_dir = setting("", "absolute path of a finished run; start from its model")
    training_dir = setting(
        "", "absolute path of the folder through which runs with the same training share it"
    )
    checkpoint_every = setting(10, "rounds between checkpoints in output-dir; 0: none", ROUNDS)
    resume = setting(False, "resume from the newest complete checkpoint in output-dir")
    round_timeout = setting(
        3600.0,
        "seconds to wait for a client's reply (in process: for its work); later ones are dropped",
        SECONDS,
    )
    stacked_clients = setting(
        1, "in-process engine: train this many clients at once, as one stacked model", "[1, 10000]"
    )
    serve_dir = setting("", "absolute path of a finished run; serve it without training")
    serve_round = setting("best", "serve the model of this round", ("best", "last"))
    serve_every = setting(30.0, "seconds between two checks for nodes to serve", DAY)
    serve_timeout = setting(600.0, "seconds for a node to adapt its model and write its files", DAY)
    serve_again = setting(False, "also serve nodes that already have their model")
    serving = setting(
        "", "written by `fedapps serve`: the message to nodes, in JSON", longest=LONGEST_CARD
    )
