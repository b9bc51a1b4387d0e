"""What every client uses: the base class, arrays, local SGD, evaluation, the protocol."""
