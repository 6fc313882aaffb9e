"""Run a region: one autograd function, a fused forward pass and a backward pass on the grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradfilter import kernels
from gradfilter.layers import ConvOp
from gradfilter.patches import upsample
from gradfilter.region import grid
from gradfilter.region.conv import Conv, Placed
from gradfilter.region.lower import Region
from gradfilter.region.step import Parameter, Step

TINY = 1e-20  # stands for a gamma nearer to 0
PLACES = 4096  # convolutions times image sizes that a region remembers


class Runner:
    """A region with its list of parameters, ready to run on any batch and image size."""

    def __init__(self, region: Region):
        self.region = region
        self.parameters: list[Parameter] = []
        seen = set()
        for step in region.steps:
            for module, name in step.parameters():
                if (id(module), name) not in seen:
                    seen.add((id(module), name))
                    self.parameters.append((module, name))
        self.position = {(id(m), n): i for i, (m, n) in enumerate(self.parameters)}
        self.norms = [
            (getattr(s, "module", None), s.norm)
            for s in region.steps
            if getattr(s, "norm", None) is not None
        ]
        # as the program was made: the modes may change before a backward pass
        self.batched = {id(n) for _, n in self.norms if n.training or n.running_mean is None}
        self.places: dict[tuple, Placed] = {}
        self.last_use = {v: i for i, s in enumerate(region.steps) for v in s.inputs}

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        tensors = [getattr(m, n) for m, n in self.parameters]
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *tensors))
        device = inputs[0].device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if inputs[0].dtype == torch.float64:  # autocast leaves it alone
            dtype = None
        inputs = [
            x.to(dtype or x.dtype).contiguous(memory_format=torch.channels_last) for x in inputs
        ]
        if not needs:
            with torch.autocast(device, enabled=False):
                return Forward(self, inputs, tensors, frozenset(), ()).run()
        flags = tuple(t.requires_grad for t in (*inputs, *tensors))
        with torch.autocast(device, enabled=False):
            return list(_RegionFunction.apply(self, flags, len(inputs), *inputs, *tensors))

    def epsilons(self, norms: list[nn.Module], like: Tensor) -> Tensor | float:
        """The epsilon of every channel of these batch norms; one number where they agree."""
        first = norms[0].eps
        if all(n.eps == first for n in norms):
            return first
        return torch.cat([like.new_full((n.num_features,), n.eps) for n in norms])

    def needs(self, flags: tuple[bool, ...]) -> frozenset[int]:
        """The values that a gradient has to reach."""
        region = self.region
        count = len(region.inputs)
        found = {v for v, f in zip(region.inputs, flags[:count], strict=True) if f}
        for step in region.steps:
            own = (flags[count + self.position[id(m), n]] for m, n in step.parameters())
            if any(own) or any(v in found for v in step.inputs):
                found.add(step.out)
        return frozenset(found)


class _State:
    """What the steps see in either direction."""

    def __init__(self, runner: Runner, tensors, needs: frozenset[int], flags: tuple[bool, ...]):
        self.runner, self.tensors, self.needs, self.flags = runner, tensors, needs, flags
        self.method = runner.region.method
        self.folded: dict[int, tuple[Tensor, Tensor]] = {}  # of a batch norm: scale, 1/sigma

    def parameter(self, module: nn.Module, name: str) -> Tensor:
        return self.tensors[self.runner.position[id(module), name]]

    def weight(self, module: nn.Module, like: Tensor) -> Tensor:
        """The weight of a convolution in the type of the maps."""
        return self.parameter(module, "weight").to(like.dtype)

    def optional(self, module: nn.Module, name: str) -> Tensor | None:
        return None if getattr(module, name) is None else self.parameter(module, name)

    def trained(self, module: nn.Module | None, name: str) -> bool:
        i = self.runner.position.get((id(module), name)) if module is not None else None
        return i is not None and self.flags[len(self.runner.region.inputs) + i]

    def batch_norm(self, norm: nn.Module) -> bool:
        """Whether a batch norm uses the statistics of the batch."""
        return id(norm) in self.runner.batched

    def scale(self, norm: nn.Module) -> Tensor:
        """gamma / sigma of a frozen batch norm, never 0, so that it can be divided out again."""
        return self.folded[id(norm)][0]

    def rstd(self, norm: nn.Module) -> Tensor:
        return self.folded[id(norm)][1]


class Forward(_State):
    """The forward pass: dense maps live as long as a step reads them."""

    def __init__(self, runner, inputs, tensors, needs, flags):
        super().__init__(runner, tensors, needs, flags)
        self.dense: dict[int, Tensor] = dict(zip(runner.region.inputs, inputs, strict=True))
        self.means: dict[int, Tensor] = {}
        self.saved: dict[tuple, Tensor] = {}
        self.notes: dict[object, object] = {}
        reached = (s for s in runner.region.steps if s.out in needs)
        self.wanted = {v for s in reached for v in s.means(self.trained)}
        self.shifts: dict[tuple[int, int], Tensor] = {}  # of a convolution and its batch norm
        self.here = 0
        self._fold()

    def run(self) -> list[Tensor]:
        region = self.runner.region
        for v in region.inputs:
            if v in self.wanted:
                x = self.dense[v]
                self.means[v] = kernels.patch_mean(x, grid.side(self.method, tuple(x.shape[-2:])))
        for self.here, step in enumerate(region.steps):
            step.forward(self)
            for v in step.inputs:
                if self.runner.last_use[v] == self.here and v not in region.outputs:
                    self.dense.pop(v, None)
        return [self.dense[v] for v in region.outputs]

    def write(self, value: int, x: Tensor, mean: Tensor | None) -> None:
        """The map of a value; its patch mean too where the backward pass wants it."""
        self.dense[value] = x
        if value in self.wanted:
            if mean is None:
                mean = kernels.patch_mean(x, grid.side(self.method, tuple(x.shape[-2:])))
            self.means[value] = mean

    def affine(self, conv: nn.Module | None, norm: nn.Module | None):
        """Scale and shift that follow a convolution: its bias and its frozen batch norm."""
        if norm is None:
            return None, self.optional(conv, "bias")
        return self.folded[id(norm)][0], self.shifts[id(conv), id(norm)]

    def _fold(self) -> None:
        """Scale, 1/sigma and shift of every frozen batch norm, all layers in one vector."""
        pairs = [p for p in self.runner.norms if not self.batch_norm(p[1])]
        if not pairs:
            return
        norms = [norm for _, norm in pairs]
        variance = torch.cat([n.running_var for n in norms])
        eps = self.runner.epsilons(norms, variance)
        rstd = torch.rsqrt(variance + eps)
        gamma = torch.cat([self._or_full(n, "weight", 1.0) for n in norms])
        scale = torch.where(gamma.abs() < TINY, TINY, gamma) * rstd
        mean = torch.cat([self._centre(*pair) for pair in pairs])
        beta = torch.cat([self._or_full(n, "bias", 0.0) for n in norms])
        shift = torch.addcmul(beta, mean, scale, value=-1)
        sizes = [n.num_features for n in norms]
        parts = zip(scale.split(sizes), rstd.split(sizes), shift.split(sizes), strict=True)
        for (conv, norm), (own_scale, own_rstd, own_shift) in zip(pairs, parts, strict=True):
            self.folded[id(norm)] = own_scale, own_rstd
            self.shifts[id(conv), id(norm)] = own_shift

    def _or_full(self, norm: nn.Module, name: str, value: float) -> Tensor:
        p = self.optional(norm, name)
        return torch.full_like(norm.running_var, value) if p is None else p

    def _centre(self, conv: nn.Module | None, norm: nn.Module) -> Tensor:
        """The mean the batch norm subtracts, less the bias of the convolution before it."""
        bias = None if conv is None else self.optional(conv, "bias")
        return norm.running_mean if bias is None else norm.running_mean - bias

    def current_mean(self, value: int) -> Tensor | None:
        return self.means.get(value)

    def consume(self, step: Step, value: int) -> Tensor:
        """A map that the step may overwrite."""
        x = self.dense[value]
        outside = value in self.runner.region.inputs or value in self.runner.region.outputs
        if outside or self.runner.last_use[value] != self.here:
            return x.clone(memory_format=torch.channels_last)
        return x

    def convolve(self, op: ConvOp, x: Tensor, w: Tensor) -> Tensor:
        """The convolution alone; a 1x1 layer is one matrix product of channels-last rows."""
        if op.pointwise and op.stride == (1, 1) and op.groups == 1:
            n, c, h, width = x.shape
            rows = x.permute(0, 2, 3, 1).reshape(-1, c)
            y = rows @ w.flatten(1).T
            return y.view(n, h, width, -1).permute(0, 3, 1, 2)
        y = op.forward(x, w, None)
        return y.contiguous(memory_format=torch.channels_last)

    def place(self, step: Conv, x: Tensor) -> Placed:
        """The convolution for this size of input; worked out once per size."""
        key = step.out, x.shape[2], x.shape[3], x.dtype, x.device
        found = self.runner.places.get(key)
        if found is None:
            if len(self.runner.places) >= PLACES:
                self.runner.places.clear()
            found = self.runner.places[key] = step.place(self.method, x)
        self.notes[step.out] = found
        return found

    def keep(self, step: Step, name: str, x: Tensor) -> None:
        if step.out in self.needs:
            self.saved[step.out, name] = x

    def note(self, step: Step, name: str, value) -> None:
        self.notes[step.out, name] = value


class Backward(_State):
    """The backward pass: every gradient is a map of patch means."""

    def __init__(self, runner, tensors, needs, flags, saved, means, notes, folded):
        super().__init__(runner, tensors, needs, flags)
        self.folded = folded
        self.saved, self.means, self.notes = saved, means, notes
        self.grads: dict[int, Tensor] = {}
        self.parameter_grads: list[Tensor | None] = [None] * len(tensors)

    def run(self) -> None:
        for step in reversed(self.runner.region.steps):
            g = self.grads.pop(step.out, None)
            if g is not None and step.out in self.needs:
                step.backward(self, g)

    def add(self, value: int, g: Tensor) -> None:
        if value in self.needs:
            before = self.grads.get(value)
            self.grads[value] = g if before is None else before + g

    def gradient(self, module: nn.Module, name: str, g: Tensor) -> None:
        if not self.trained(module, name):
            return
        i = self.runner.position[id(module), name]
        g = g.to(self.tensors[i].dtype)
        before = self.parameter_grads[i]
        self.parameter_grads[i] = g if before is None else before + g

    def kept(self, step: Step, name: str) -> Tensor | None:
        return self.saved.get((step.out, name))

    def mean(self, value: int) -> Tensor:
        return self.means[value]

    def placed(self, step: Conv) -> Placed:
        return self.notes[step.out]

    def weight_wanted(self, step: Conv) -> bool:
        """Whether the gradient of the (folded) weight is needed."""
        return self.trained(step.module, "weight") or self.trained(step.norm, "weight")

    def shift_wanted(self, step: Conv) -> bool:
        """Whether the sum of g over all pixels is needed."""
        return any(self.trained(m, n) for m, n in step.parameters())

    def noted(self, step: Step, name: str):
        return self.notes[step.out, name]


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, runner: Runner, flags, count: int, *tensors):
        inputs, parameters = tensors[:count], tensors[count:]
        f = Forward(runner, inputs, parameters, runner.needs(flags), flags)
        outputs = f.run()
        ctx.runner, ctx.flags, ctx.needs, ctx.notes = runner, flags, f.needs, f.notes
        ctx.folded = f.folded
        ctx.set_materialize_grads(False)  # what no gradient reaches gets none, not zeros
        ctx.saved_keys, ctx.mean_keys = list(f.saved), list(f.means)
        ctx.x_shapes = [tuple(x.shape) for x in inputs]
        ctx.save_for_backward(*f.saved.values(), *f.means.values(), *parameters)
        region = runner.region
        ctx.mark_non_differentiable(
            *(t for v, t in zip(region.outputs, outputs, strict=True) if v not in f.needs)
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        runner, region = ctx.runner, ctx.runner.region
        tensors = ctx.saved_tensors
        n, m = len(ctx.saved_keys), len(ctx.mean_keys)
        saved = dict(zip(ctx.saved_keys, tensors[:n], strict=True))
        means = dict(zip(ctx.mean_keys, tensors[n : n + m], strict=True))
        parameters = tensors[n + m :]
        b = Backward(
            runner, parameters, ctx.needs, ctx.flags, saved, means, ctx.notes, ctx.folded
        )
        for v, g in zip(region.outputs, grads, strict=True):
            if g is not None and v in ctx.needs:
                g = g.contiguous(memory_format=torch.channels_last)
                b.add(v, kernels.patch_mean(g, grid.side(b.method, tuple(g.shape[-2:]))))
        b.run()
        inputs = [
            _dense(b.grads.get(v), b.method, shape)
            for v, shape in zip(region.inputs, ctx.x_shapes, strict=True)
        ]
        return None, None, None, *inputs, *b.parameter_grads


def _dense(g: Tensor | None, method, shape) -> Tensor | None:
    """The gradient of a region's input at full resolution."""
    if g is None:
        return None
    size = tuple(shape[-2:])
    return upsample(g, size, grid.side(method, size))


class _Project(torch.autograd.Function):
    """The identity, whose gradient is replaced by its patch means."""

    @staticmethod
    def forward(ctx, x, side):
        ctx.side = side
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        size = tuple(g.shape[-2:])
        return upsample(kernels.eager.patch_mean(g, ctx.side), size, ctx.side), None


class Plain:
    """The same region at the layer level: dense maps, autograd, projection at every value."""

    def __init__(self, region: Region):
        self.region, self.method = region, region.method

    def batch_norm(self, norm: nn.Module) -> bool:
        return norm.training or norm.running_mean is None

    def project(self, x: Tensor) -> Tensor:
        if self.method is None:  # a region without a convolution has no grid
            return x
        return _Project.apply(x, grid.side(self.method, tuple(x.shape[-2:])))

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        values = {
            v: self.project(x) for v, x in zip(self.region.inputs, inputs, strict=True)
        }
        for step in self.region.steps:
            out = step.plain(self, *(values[v] for v in step.inputs))
            values[step.out] = self.project(out)
        # copies, for what follows may write in place, and a projection is a view
        return [values[v].clone() for v in self.region.outputs]

