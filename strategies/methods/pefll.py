"""PeFLL server (Scott, Zakerinia and Lampert, ICLR 2024, Algorithm 2).

A hypernetwork on the server and an embedding network of labeled samples on the clients are learnt
end to end.

θ_i = h(v_i; η_h) goes to the client, which returns θ_i + Δθ_i. Then
Δη_h = Σ_i (∂θ_i/∂η_h)ᵀ Δθ_i / |C| and Δη_v = Σ_i (∂v_i/∂η_v)ᵀ (∂θ_i/∂v_i)ᵀ Δθ_i / |C|, which are
ODPFL-HN's steps. λ_h = λ_v is half of `server_weight_decay`, λ_θ half of the clients'
`weight_decay`. Departs from the paper: gradients of the two networks are clipped separately;
descriptors are centred and scaled by running statistics of all training clients
(`descriptor_rate`), where the authors' code takes those of the first client's first descriptor."""

from dataclasses import replace

from strategies.methods.odpfl_hn import ODPFLHN


class PeFLL(ODPFLHN):
    """Server settings as the authors' code has them."""

    requires = replace(ODPFLHN.requires, method="pefll")

    server_lr = 0.0002  # of the hypernetwork; this and the next two as in the authors' code
    encoder_lr = 0.0002
    server_optimizer = "adam"
    clip_norm = 50.0
    descriptor_rate = 0.1
