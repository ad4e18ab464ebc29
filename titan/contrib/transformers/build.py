"""Construction of transformers' model: parameters on meta, buffers with their values, and how each parameter is drawn."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import attention, experts
from .config import ModelSource, rope_types
from .errors import UnsupportedModelError, refusing
from .fake_tensors import is_fake

_HOST_VALUES = (
    2**28
)  # of a tensor: the experts of a layer of DeepSeek-V3 are more than many hosts allow
_COPIED = -1.0  # in place of a standard deviation: code of the model computes the values
Init = float | Callable[[int], Tensor] | None
"""How a parameter begins: a standard deviation, values by seed, or ones."""


def build(source: ModelSource) -> tuple[Any, dict[int, Init]]:
    """Return transformers' model on meta, and how each parameter begins, by its identity.

    Raises:
        UnsupportedModelError: transformers does not build it.
    """
    import transformers

    content = json.loads(source.hf)
    if "dynamic" in rope_types(content):
        raise UnsupportedModelError(
            "the longest sequence so far decides its rotary frequencies (rope_type dynamic): set another in model.overrides, such "
            'as {rope_parameters = {rope_type = "default"}}'
        )
    if source.code:
        config = transformers.AutoConfig.from_pretrained(source.code, trust_remote_code=True)
    else:
        config = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
    config._attn_implementation = attention.PROBE
    config._experts_implementation = experts.IMPLEMENTATION
    config.use_cache = False
    for key in ("output_router_logits", "output_hidden_states", "output_attentions"):
        setattr(config, key, False)  # outputs of a call that titan does not read
    name = (content.get("architectures") or [""])[0]
    try:
        with (
            refusing("transformers does not build it"),
            _parameters_on_meta(),
            _Inits() as inits,
        ):
            if source.code:
                model = transformers.AutoModelForCausalLM.from_config(
                    config, trust_remote_code=True
                )
            else:
                causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
                kind: Any = getattr(transformers, name, None) or causal[type(config)]
                model = kind(config)
            _require_plain_loss(type(model), content)
            for module in model.modules():
                model._init_weights(module)
    except UnsupportedModelError as error:
        if attention.PROBE not in str(error):
            raise
        raise UnsupportedModelError(
            f"{content['model_type']} computes attention without transformers' interface"
        ) from error
    for module in model.modules():
        for key, p in module.named_parameters(recurse=False):
            if inits.std.get(id(p)) == _COPIED:
                inits.std[id(p)] = partial(_values, model._init_weights, module, key)
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            # It looks at the tokens on the host, to warn of padding. titan's batches have none.
            module.__dict__["warn_if_padding_and_no_attention_mask"] = lambda *_, **__: None
    model.train()
    return model, inits.std


def _require_plain_loss(kind: type[nn.Module], content: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if a class adds terms to the cross entropy of its logits."""
    code = inspect.getsource(kind)
    for key, weight in content.items():
        of_router = "aux" in key and "output_router_logits" in code
        is_on = bool(weight) and (not of_router or content.get("output_router_logits"))
        if "loss" in key and is_on and f"self.{key}" in code:
            fix = "output_router_logits = false" if of_router else f"{key} = 0.0"
            raise UnsupportedModelError(
                f"{kind.__name__} adds {key} x {weight} to its loss, and titan's loss is the cross entropy of its logits: to train without, "
                f"set {fix} in model.overrides"
            )


def _values(
    init_weights: Callable[[nn.Module], Any], module: nn.Module, name: str, seed: int
) -> Tensor:
    """Return the values of a module's own parameter that transformers computes for a seed, such as the logarithms of decays."""

    def copied(module: nn.Module, device: str) -> Any:
        twin = copy.copy(module)
        own = module._parameters.items()
        twin._parameters = {
            n: None if p is None else nn.Parameter(torch.empty(p.shape, device=device))
            for n, p in own
        }
        children = module._modules.items()
        twin._modules = {n: None if m is None else copied(m, "meta") for n, m in children}
        return twin

    twin = copied(module, "cpu")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        init_weights(twin)
    return twin._parameters[name].detach()


class _Inits(TorchDispatchMode):
    """Record of how transformers draws each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.std: dict[int, Init] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, values = func.overloadpacket._qualified_op_name.partition("::")[2], [*args[1:]]
        values += (kwargs or {}).values()
        numbers = [v for v in values if isinstance(v, (int, float))]
        if name == "normal_":
            self._put(args[0], numbers[1] if len(numbers) > 1 else 1.0)
        elif name == "uniform_":
            self._put(args[0], (numbers[1] - numbers[0]) / 12**0.5)
        elif name == "zero_" or (name == "fill_" and numbers[:1] == [0]):
            self._put(args[0], 0.0)
        elif name == "fill_" and numbers[:1] == [1]:
            self._put(args[0], None)
        elif name == "copy_":
            self._put(args[0], _COPIED)
        elif name == "empty" and prod(args[0]) > _HOST_VALUES:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return func(*args, **(kwargs or {}))

    def _put(self, tensor: Tensor, std: float | None) -> None:
        self.std[id(tensor)] = std


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build parameters on meta, and buffers with their values on the CPU."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            # Memory that is never written to costs nothing.
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register


def fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Fill the buffers of a module with the values that transformers gives them."""
    for name, value in values.items():
        buffer = module.get_buffer(name)
        if is_fake(buffer):
            buffer.zero_()  # a simulator asks for no numbers
        else:
            buffer.copy_(value)
