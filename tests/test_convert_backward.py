"""The backward pass of a converted model: what is kept for it, what it computes and refuses."""

import pytest
import torch
from cases import small_cnn
from converted import (
    FILTER,
    METHODS,
    PATCH1,
    assert_equal_gradients,
    batch,
    gradients,
    loss_of,
    methods,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import gradfilter as gf


def saved_tensors(run, model):
    """The tensors, other than the model's own, that autograd keeps of `run()`."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return [t for t in kept if t.untyped_storage().data_ptr() not in own]


@methods
def test_a_frozen_layer_keeps_nothing(method):
    conv = nn.Conv2d(3, 4, 1)
    conv.weight.requires_grad_(False)
    x = batch().requires_grad_()
    assert saved_tensors(lambda: conv(x), conv)  # plain PyTorch keeps the input
    gf.convert(conv, method)
    ys = []
    assert saved_tensors(lambda: ys.append(conv(x)), conv) == []
    ys[0].sum().backward()
    assert x.grad.isfinite().all() and conv.weight.grad is None
    assert torch.equal(conv.bias.grad, torch.full((4,), 4 * 12 * 12.0))


def test_nothing_is_kept_before_the_first_trained_layer():
    model = small_cnn()
    gf.convert(model, FILTER, last=1)
    assert saved_tensors(lambda: model[:5](batch()), model) == []
    assert not model[:5](batch()).requires_grad
    (kept,) = saved_tensors(lambda: model[:6](batch()), model)
    assert kept.shape == (4, 8, 3, 3)


def test_no_gradient_mode_keeps_nothing():
    model = small_cnn()
    gf.convert(model, FILTER)
    with torch.no_grad():
        assert saved_tensors(lambda: model(batch()), model) == []


@pytest.mark.parametrize(("last", "calls"), [(None, 2), (3, 2), (2, 1), (1, 0)])
def test_the_first_trained_layer_computes_no_input_gradient(monkeypatch, last, calls):
    count = []
    inherited = gf.GalerkinFilter.grad_input

    def spy(self, op, g, w, x_shape):
        count.append(x_shape)
        return inherited(self, op, g, w, x_shape)

    monkeypatch.setattr(gf.GalerkinFilter, "grad_input", spy)
    model = small_cnn()
    gf.convert(model, FILTER, last=last)
    loss_of(model).backward()
    assert len(count) == calls


def test_a_layer_of_which_only_the_bias_is_trained():
    model = small_cnn()
    model[3].weight.requires_grad_(False)
    gf.convert(model, FILTER)
    grads = gradients(model)
    assert "3.weight" not in grads and "3.bias" in grads and "0.weight" in grads


@methods
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()])
def test_double_backward_is_refused(method, loss):
    model = small_cnn()
    gf.convert(model, method)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss(model(batch())), parameters, create_graph=True)
    # the last converted layer is the first that the second backward pass meets
    with pytest.raises(RuntimeError, match=r"double backward through a layer converted to \w+\("):
        torch.autograd.grad(sum(g.square().sum() for g in grads), parameters)


def test_double_backward_names_the_method():
    conv = nn.Conv2d(3, 4, 3)
    gf.convert(conv, FILTER)
    x = batch().requires_grad_()
    (gx,) = torch.autograd.grad(conv(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"GalerkinFilter\(patch=2\).*revert the"):
        gx.sum().backward()


def test_create_graph_alone_is_no_error():
    model = small_cnn()
    gf.convert(model, FILTER)
    expected = gradients(model)
    torch.manual_seed(0)
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    assert_equal_gradients(dict(zip(expected, grads, strict=True)), expected)


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("method", [*METHODS, PATCH1, gf.GalerkinFilter(grid=7)], ids=repr)
def test_what_pytorch_has_before_a_layer_can_read_its_gradient(method, images, kernel, last):
    """A batch norm's gradients are sums of what the layer behind it hands on, however that lies."""
    torch.manual_seed(0)
    norm, conv = nn.BatchNorm2d(8).eval(), nn.Conv2d(8, 4, kernel, padding=kernel // 2)
    x = torch.randn(images, 8, 7, 7).contiguous(memory_format=last)
    layers = nn.Sequential(conv, nn.Conv2d(4, 4, 1))
    gf.convert(layers, method)  # 3x3 layers are left exact by a method that cannot take them
    handed = []
    z = norm(x)
    z.register_hook(lambda g: handed.append(g.double().sum((0, 2, 3))))
    y = layers(z)
    y.backward(torch.randn(y.shape))
    assert torch.allclose(norm.bias.grad.double(), handed[0], rtol=1e-4, atol=1e-4)
