"""Which modules keep FP32 weights, and which compute in FP32 because the preset names them."""

from __future__ import annotations

import gc
import re
import weakref
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import ParametrizationList

from mpx.engine.structure import modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpx.presets.policy import Policy

__all__ = ["ModuleRules"]

WRAPPERS = re.compile(
    r"^(?:(?:module|_orig_mod)(?:\.|$))*"
)  # of DDP and torch.compile: no part of a user's path
# weight_norm, spectral_norm and pruning: before each call they make an attribute out of the module's parameters
REMAKES_WEIGHTS = "torch.nn.utils."


class ModuleRules:
    """Answers by identity; a module is forgotten when it dies.

    What stays FP32 beside what the preset says, because a half copy would lose something that the module does with
    the parameter itself: RNNs (they hold their weights in a second list), embeddings with sparse gradients or
    `max_norm`, and the operands of weight normalization, spectral normalization, pruning and parametrizations. Where
    weights really are half (O3) there is no copy, and only the preset speaks.
    """

    def __init__(self, policy: Policy) -> None:
        self._patterns = list(policy.fp32_modules)
        self._keep_batchnorm = bool(policy.keep_batchnorm_fp32)
        self._copies = policy.master_weights is True
        # TorchScript differentiates by rules of its own, which fail on the mixed types of autocast (torch 2.13), and
        # lets nobody replace its parameters. At O3, where it really is half, it works as it is.
        casts_calls = policy.cast_model_type != "float32" and policy.master_weights is not False
        self._compiled: tuple[type[nn.Module], ...] = (torch.jit.ScriptModule,) if casts_calls else ()
        self._keeps: dict[int, bool] = {}  # of every module seen, by id
        self._named: set[int] = set()
        self._roots: set[int] = set()
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self.any_named = bool(self._patterns)

    @property
    def has_exceptions(self) -> bool:
        """Whether the preset keeps the weights of any module FP32."""
        return self.any_named or self._keep_batchnorm

    def learn(self, root: nn.Module, parts: list[nn.Module] | None = None) -> list[nn.Module]:
        """Look at the tree of an outermost call, and return what of it was not seen before."""
        known = self._keeps
        new = [part for part in parts or modules_of(root) if id(part) not in known]
        if new or id(root) not in self._roots:
            self._roots.add(id(root))
            if self._patterns:
                for top in (root, *_containing(root)):
                    self._match_names(top)
            for part in new:
                self._see(part)
        return new

    # dynamo runs this when it traces a call, instead of tracing into it: names are matched by regular expressions
    learn._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def computes_float32(self, module: nn.Module) -> bool:
        """Whether this is TorchScript's, or named, it or one that contains it; `learn` must have seen its tree."""
        return isinstance(module, self._compiled) or (self.any_named and id(module) in self._named)

    def keeps_float32(self, module: nn.Module) -> bool:
        """Whether the parameters that this module itself owns stay FP32; `learn` must have seen its tree."""
        return self._keeps.get(id(module), False)

    def name(self, module: nn.Module) -> None:
        """Let a module compute in FP32 from now on, as if the preset had named it."""
        self.any_named = True
        for part in module.modules():
            self._named.add(id(part))
            self.keep(part)

    def keep(self, module: nn.Module) -> None:
        """Keep the parameters of one module FP32 from now on."""
        self._see(module)
        self._keeps[id(module)] = True

    def kept_parameters(self) -> set[int]:
        """Return the ids of the parameters of all modules alive that stay FP32; for rare moments: it looks for them."""
        if not self.has_exceptions:
            return set()
        alive = list(_modules_alive())
        inner = {id(child) for module in alive for child in module._modules.values()}
        for module in alive:
            if self._patterns and id(module) not in inner:
                self._match_names(module)
            self._see(module)
        return {id(p) for module in alive if self.keeps_float32(module) for p in module._parameters.values()}

    def _match_names(self, top: nn.Module) -> None:
        for full, module in top.named_modules():
            path = WRAPPERS.sub("", full)
            kinds = {kind.__name__ for kind in type(module).__mro__}
            if any(pattern in kinds or fnmatchcase(path, pattern) for pattern in self._patterns):
                self.name(module)

    def _see(self, module: nn.Module) -> None:
        key = id(module)
        if key not in self._keeps:
            self._keeps[key] = self._needs_float32(module)
        if key not in self._alive:
            self._alive[key] = weakref.ref(module, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        for known in (self._named, self._roots):
            known.discard(key)
        for table in (self._keeps, self._alive):
            table.pop(key, None)

    def _needs_float32(self, module: nn.Module) -> bool:
        if isinstance(module, _BatchNorm):
            return self._keep_batchnorm
        if not self._copies:
            return False
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return module.sparse or module.max_norm is not None
        return isinstance(module, (nn.RNNBase, ParametrizationList, *self._compiled)) or any(
            type(hook).__module__.startswith(REMAKES_WEIGHTS) for hook in module._forward_pre_hooks.values()
        )


def _modules_alive() -> Iterator[nn.Module]:
    """Yield every module of the process; by `type`, because asking a stranger for its class may run its code."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))


def _containing(module: nn.Module) -> list[nn.Module]:
    """Return the modules that contain `module`: a script may call only parts of its model, `model.decode(z)`."""
    return [top for top in _modules_alive() if top is not module and module in modules_of(top)]
