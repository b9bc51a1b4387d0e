"""What a run is configured with, whatever its method and its partition."""

from fedapps.common.settings import COUNT, POSITIVE_INT, ROUNDS, SECONDS, Configured, setting

DAY = "(0, 86400]"


class RunSettings(Configured):
    """The settings of every run, read by the apps and by `partitions`."""

    method = setting("fedavg", "a name of `fedapps list methods`", listed=True)
    dataset = setting("digits", "a name of `fedapps list datasets`")
    data_dir = setting("", "folder that holds <dataset>/; empty: $FEDAPPS_DATA_DIR, then the hub")
    image_size = setting(
        0, "own images: cropped and resized to so many pixels a side; 0: unchanged", "[0, 4096]"
    )
    label = setting("", "own tables: the column of labels; empty: label, class or the like")
    partition = setting("pathological", "a name of `fedapps list partitions`")
    num_clients = setting(20, "training and novel clients together", POSITIVE_INT)
    train_fraction = setting(0.5, "share of the clients that train; the others are novel", "(0, 1]")
    rounds = setting(30, "rounds of training", ROUNDS)
    model = setting("mlp", "a name of `fedapps list models`")
    client_models = setting(
        "",
        'models dealt by client id, as "small,medium,big" (sizes of `model`)',
        listed=True,
    )
    restrict_to_model = setting("", "run only the clients to which client-models deals this model")
    standardize = setting(
        "none",
        "inputs: none: in [0, 1]; training-clients: by their mean and deviation; channels: by the "
        "dataset's customary constants",
        ("none", "training-clients", "channels"),
    )
    data_seed = setting(-1, "seed of the split alone; -1: seed", "[-1, 9223372036854775807]")
    novel_shots = setting(
        0, "labeled samples of each class that a novel client learns from; others score it", COUNT
    )
    early_stopping = setting(
        0, "evaluations without a better validation that end training; 0: never", ROUNDS
    )
    callbacks = setting(
        "", '"tensorboard", "mlflow", "wandb", or your own as "my_lab.hooks:Slack"', listed=True
    )
    output_dir = setting("", "absolute folder for the results; empty: nothing is written")
    from_dir = setting("", "absolute folder of a finished run, whose model this one starts from")
    checkpoint_every = setting(10, "rounds between checkpoints in output-dir; 0: none", ROUNDS)
    resume = setting(False, "resume from the newest whole checkpoint in output-dir, if any")
    round_timeout = setting(
        3600.0,
        "seconds for a client's answer, in process for its own work; later replies are dropped",
        SECONDS,
    )
    stacked_clients = setting(
        1, "in-process engine: so many clients train side by side, as one stack", "[1, 10000]"
    )
    serve_dir = setting("", "absolute folder of a finished run that is served, without training")
    serve_round = setting("best", "round of the model that is served", ("best", "last"))
    serve_every = setting(30.0, "seconds between looks for nodes to serve", DAY)
    serve_timeout = setting(600.0, "seconds that a node has to adapt and to write its files", DAY)
    serve_again = setting(False, "serve also nodes that already have their model")
    serving = setting("", "of a run that serves: what `fedapps serve` sends to nodes, in JSON")
