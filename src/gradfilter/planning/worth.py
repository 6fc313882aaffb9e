"""What training a layer is worth: its gradient's energy, and how much of it a method gets right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradfilter import trial
from gradfilter.fidelity import Sums
from gradfilter.methods import Exact, Method
from gradfilter.order import call, evaluating
from gradfilter.planning.chain import Chain
from gradfilter.trial import Target

Gradients = list[Tensor | None]  # of the weight of every link


class Likeness(NamedTuple):
    """How an approximate gradient a lies to the exact one e: cosine, and |a| / |e|; 0 without."""

    cosine: float
    norm: float

    @property
    def gain(self) -> float:
        """The energy of e less that of the error: (|e|^2 - |a - e|^2) / |e|^2.

        A step along a lowers a quadratic of curvature L by <e, a> / L - |a|^2 / (2 L), of which
        the exact step reaches |e|^2 / (2 L). A filter that only takes something away has cos^2;
        one that adds what is not there loses, and may do worse than not to train the layer.
        """
        return 2 * self.norm * self.cosine - self.norm**2


@dataclass(frozen=True)
class Worth:
    """Exact weight gradients, their energies |e|^2, and every method's likeness, by link."""

    exact: Gradients
    energy: list[float]
    likeness: dict[Method, list[Likeness]]

    def value(self, link: int, likeness: Likeness) -> float:
        """What a step that trains the link gains."""
        return self.energy[link] * likeness.gain

    def total(self, method: Method) -> float:
        """What all links are worth with one method on all of them."""
        return sum(self.value(i, found) for i, found in enumerate(self.likeness[method]))


def worth(chain: Chain, batch, target: Target, methods: list[Method]) -> Worth:
    """Weigh every link by one exact backward pass, and one more with each method on all links."""
    exact = gradients(chain, chain.exact, batch, target)
    energy = [0.0 if g is None else float(g.double().square().sum()) for g in exact]
    found = {}
    for method in methods:
        same = method == Exact()
        own = exact if same else gradients(chain, chain.uniform(method), batch, target)
        found[method] = likenesses(own, exact)
    return Worth(exact, energy, found)


def gradients(
    chain: Chain, model: nn.Module, batch, target: Target, chosen: set[int] | None = None
) -> Gradients:
    """The weight gradients of the chosen links, or of all; nothing is random on the way."""
    chain.train(set(range(len(chain.links))) if chosen is None else chosen)
    with torch.enable_grad(), evaluating(model):
        call(model, chain.one)  # an engine makes its program now
        loss = trial.loss_of(call(model, batch), target)
        if not bool(loss.isfinite()):
            raise ValueError(f"plan: the loss of this batch is {loss.item()}")
        loss.backward()
    found = [_gradient(model.get_submodule(x.name)) for x in chain.links]
    chain.train(set())
    return found


def _gradient(layer: nn.Module) -> Tensor | None:
    """A weight's gradient; where the weight is computed, that of what it is computed from."""
    parts = [layer._parameters["weight"]] if "weight" in layer._parameters else layer.parameters()
    grads = [p.grad.flatten() for p in parts if p is not None and p.grad is not None]
    return torch.cat(grads) if grads else None


def likenesses(approximate: Gradients, exact: Gradients) -> list[Likeness]:
    found = []
    for a, e in zip(approximate, exact, strict=True):
        sums = Sums()
        if a is not None and e is not None:
            sums.add(a, e)
        match = sums.match()
        found.append(Likeness(match.cosine or 0.0, match.norm or 0.0))
    return found


def own_labels(model: nn.Module, batch) -> tuple[Target, str]:
    """A target where none is given, and what it is.

    Classes drawn from the model's own softmax, by which the expected energy of a layer's gradient
    is its Fisher information; for outputs that are no scores of classes the mean square.
    """
    with torch.no_grad(), evaluating(model):
        scores = call(model, batch)
    if not (isinstance(scores, Tensor) and scores.is_floating_point() and scores.ndim in (2, 4)):
        return None, "no target: the loss is the mean square of the output"
    if not bool(scores.isfinite().all()):
        raise ValueError("plan: the model's output of this batch has NaN or infinite values")
    shares = scores.detach().float().movedim(1, -1).softmax(-1)  # [N, ..., classes]
    generator = torch.Generator(shares.device).manual_seed(0)
    drawn = torch.multinomial(shares.flatten(0, -2), 1, generator=generator)
    return drawn.view(shares.shape[:-1]), "no target: classes drawn from the model's own output"
