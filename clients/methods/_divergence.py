"""The Kullback–Leibler divergence of two models' predictions, and its direction (Ye et al., UPFL,
Section 3.3.1)."""

from torch import Tensor

from clients.core.normalisation import class_logits
from fedapps.common.settings import setting

KL_DIRECTION = setting(
    "student-teacher",
    "KL(client ‖ server), as the paper prints it, or the reverse",
    ("student-teacher", "teacher-student"),
)


def kl_categorical(p: Tensor, q: Tensor) -> Tensor:
    """Mean over the batch of KL(σ(p) ‖ σ(q)), from logits (n, C), or one output for two classes."""
    log_p = class_logits(p).log_softmax(1)
    log_q = class_logits(q).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def divergence(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """KL(student ‖ teacher) as printed, or KL(teacher ‖ student) as in the authors' code.

    Both arguments are logits (n, C)."""
    if direction == "student-teacher":
        return kl_categorical(student, teacher)
    return kl_categorical(teacher, student)
