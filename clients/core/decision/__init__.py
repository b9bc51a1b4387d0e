"""Whether and how to adapt to inputs without labels: the equations, on arrays.

`moments` summarises a network's inner values by class; `fit` says how well other class proportions
explain a client; `changes` and `played` make newcomers of training samples; `evidence` describes
the predictions that a correction changes; `choice` estimates the gain and decides."""
