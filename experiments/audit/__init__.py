"""An attack on every private path: the ε that a run states, and the ε that an attack proves.

    python -m experiments.audit [--page docs/concepts/privacy.md] [--seeds 500]

`bound` turns an attack's errors into a lower bound of ε, `federation` holds the worst case,
`entries` observes what is released through each entry point, and `paths` is the list of what is
attacked."""
