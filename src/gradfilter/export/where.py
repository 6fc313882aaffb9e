"""Which module of a network makes a call, forward or backward, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules import module as calls
from torch.utils._pytree import tree_leaves


class Where:
    """The modules that are being called, by name; and whose forward pass made an autograd node.

    What the engine runs as one region is the network's own, whose name is "".
    """

    def __init__(self, model: nn.Module | None):
        self.names = {} if model is None else {m: name for name, m in model.named_modules()}
        self.stack: list[str] = []
        self.made: dict[object, str] = {}  # autograd node -> module

    @property
    def now(self) -> str:
        """The name of the module whose call, or whose backward pass, this is."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.made.get(node, "")
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Follow all calls of modules for a while."""
        hooks = [
            calls.register_module_forward_pre_hook(self._entered),
            calls.register_module_forward_hook(self._left, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entered(self, m: nn.Module, args) -> None:
        if m in self.names:
            self._note(args)
            self.stack.append(self.names[m])

    def _left(self, m: nn.Module, args, result) -> None:
        if m in self.names:
            self._note(result)
            self.stack.pop()

    def _note(self, tree) -> None:
        """The nodes that lead here, and were not made by modules before, are of this one."""
        nodes = [x.grad_fn for x in tree_leaves(tree) if isinstance(x, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in self.made:
                self.made[node] = self.now
                nodes.extend(n for n, _ in node.next_functions)
