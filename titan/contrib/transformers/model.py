"""A model of transformers as titan wants a model: blocks in a ModuleDict, ends by name, attention and experts that are titan's.

The computation stays transformers'. Its modules are children of `TransformersModel` under titan's names, and transformers' own
module objects, which hold the forward passes, find them through stand-ins. So a pipeline stage that lacks modules still runs
transformers' forward pass: the missing blocks return their input, and the first block of a later stage reads what the stage before sent.

B batch, S sequence, D model, V vocabulary
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import attention, experts
from .build import Init, build, fill
from .config import HeadNumbers, ModelSource, TransformersConfig, rope_types
from .disk import disk_names
from .errors import UnsupportedModelError
from .plan import Part, derive_plan
from .probe import fails, fails_in_parts, place_plain_modules, run_once
from .recurrence import prepare_recurrences
from .stand_ins import Blocks, StandIn

# Plans, and what models refuse, by source: a process builds a model several times, and trying takes three forward passes.
_LAYOUTS: dict[ModelSource, tuple[dict[str, str], dict[str, str]]] = {}


Ends = tuple[list[str], list[str]]
"""Names of the modules with parameters before and after the blocks."""


class TransformersModel(nn.Module):
    """Causal language model of transformers, from token ids to logits.

    Attributes:
        config: the sizes, as the module has them.
        tensor_plan: the tensor-parallel plan, a style for each module.
        hf_names: prefixes of our names and of transformers', for those of parameters.
        on_all_stages: children that every pipeline stage has: rotary embeddings, which have no parameters.
    """

    # Not modules of this one: transformers' own, whose forward passes find our modules through stand-ins.
    hf: Any
    base: Any
    received: Any  # on a later pipeline stage, during a forward pass: its input
    returns: int  # number of values that a block returns as a tuple; 0: a tensor
    disk: dict[
        str, tuple[Any, list[str]]
    ]  # names on disk, by the name in the first block that was asked for

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        attention.register()
        experts.register()
        hf, inits = build(source)
        base = getattr(hf, hf.base_model_prefix, hf)
        self.layers = nn.ModuleDict()
        self.hf_names: dict[str, str] = {}
        self.__dict__["hf"], self.__dict__["base"] = hf, base
        self.__dict__["received"] = None
        ends = self._adopt(hf, base)
        self.__dict__["disk"] = {}
        for module in self.modules():
            if values := {n: b for n, b in module._buffers.items() if b is not None}:
                module._buffers.update({n: b.to("meta") for n, b in values.items()})
                module.__dict__["reset_buffers"] = partial(fill, module, values)
        self.inits: dict[str, Init] = {
            name: inits.get(id(p), 0.02) for name, p in self.named_parameters()
        }
        prepare_recurrences(self)
        expert_modules = experts.prepare_experts(self, self._parts_of_expert)
        for name in expert_modules:
            block: Any = self.layers[name.split(".")[1]]
            block.traits = experts.traits_of_experts(block)
        probe = run_once(self)
        ends = _by_use(ends, probe)
        shared = place_plain_modules(self, probe, ends[1])
        self.config = _sizes(self, source, ends, probe, expert_modules)
        if source not in _LAYOUTS:
            plan, reason = self._try_heads(probe, dict(source.plan))
            refuses = {"tensor_parallel_degree": reason} if reason else {}
            _LAYOUTS[source] = plan, refuses | self._try_stages(ends[0], ends[1], shared)
        plan, refuses = _LAYOUTS[source]
        self.tensor_plan, refuses = dict(plan), {**dict(self.config.refuses), **refuses}
        if reason := self._lacks_folder(probe):
            refuses |= dict.fromkeys(("initial_load_in_hf", "last_save_in_hf"), reason)
        object.__setattr__(self.config, "refuses", tuple(refuses.items()))
        hf.config._attn_implementation = attention.RUN

    def _try_heads(
        self, probe: list[Part], given: dict[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return the tensor-parallel plan, and why there is none, or "".

        Code that does not run with a part of the heads gets all of them, as from a fused matrix.
        """
        plan, reason = derive_plan(self, probe, given)
        if reason or not (reason := fails_in_parts(self, plan)) or given:
            return plan, reason
        other, why = derive_plan(self, probe, given, whole_heads=True)
        return (plan, reason) if why or fails_in_parts(self, other) else (other, "")

    def _try_stages(self, first: list[str], last: list[str], shared: str) -> dict[str, str]:
        """Return why the model does not run as a pipeline stage, by the key of the layout.

        Args:
            first: names of the modules before the blocks.
            last: names of those after them.
            shared: name of a module that is called before and after the blocks, or "".
        """
        whole, why = self._modules, ""
        for lacking in (first, last):  # as a later stage, and as an earlier one
            self._modules = {**whole, **dict.fromkeys(lacking)}
            why = fails(self, first) or why
        self._modules = whole
        if shared:
            why = f"{shared} is called before and after its blocks"
        if name := self.__dict__.get("reads_twice"):
            why = f"{name} reads two hidden states, and a stage sends one"
        return {"pipeline_parallel_degree": why} if why else {}

    def _adopt(self, hf: Any, base: Any) -> Ends:
        """Take over all modules of transformers' model. Return our names of those with parameters before and after the blocks."""
        number = getattr(hf.config, "num_hidden_layers", None)
        if number is None:
            kind = hf.config.model_type
            raise UnsupportedModelError(
                f"{kind} has several parts; its text model is a family too"
            )
        lists = [
            (name, module)
            for name, module in hf.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == number
        ]
        if not lists:
            raise UnsupportedModelError(f"{type(hf).__name__} has no list of {number} blocks")
        place, blocks = min(lists, key=lambda found: found[0].count("."))
        path = place.split(".")
        first, last, is_before = [], [], True
        embedding, output = hf.get_input_embeddings(), hf.get_output_embeddings()
        if embedding is None or output is None:
            kind = type(hf).__name__
            raise UnsupportedModelError(
                f"{kind} has no output layer, or no embedding of tokens, as a class ...ForCausalLM has"
            )
        for depth in range(len(path)):
            owner = hf.get_submodule(".".join(path[:depth]))
            if own := [*owner._parameters, *owner._buffers]:
                raise UnsupportedModelError(f"{type(owner).__name__} itself has {own[0]}")
            for name, child in list(owner._modules.items()):
                if name == path[depth]:
                    if depth == len(path) - 1:
                        owner._modules.pop(name)
                        owner.__dict__[name] = Blocks(self, blocks)
                        is_before = False
                    continue
                if child is None:
                    continue
                theirs = ".".join([*path[:depth], name])
                ours = name
                if child is embedding or child is output:
                    ours = "tok_embeddings" if child is embedding else "output"
                elif ours in self._modules or ours in ("layers", "hf", "base", "config"):
                    ours = theirs.replace(".", "_")
                self.hf_names[f"{ours}."] = f"{theirs}."
                owner._modules.pop(name)
                owner.__dict__[name] = StandIn(self, ours)
                self.add_module(ours, child)
                if any(True for _ in child.parameters()):
                    # What follows the owner of the blocks, such as the output layer, is after them.
                    (first if is_before and depth == len(path) - 1 else last).append(ours)
        if "tok_embeddings" not in self._modules:
            raise UnsupportedModelError("its embedding is inside of another module")
        if "output" not in self._modules:
            raise UnsupportedModelError("its output layer is inside of another module")
        self.layers.update({str(n): block for n, block in enumerate(blocks)})
        owners: dict[int, str] = {}
        for name, parameter in self.layers.named_parameters(remove_duplicate=False):
            other = owners.setdefault(id(parameter), name)
            if other.split(".")[0] != name.split(".")[0]:
                raise UnsupportedModelError(
                    f"layers.{other} and layers.{name} are one parameter, and titan gives each block its own"
                )
        self.hf_names["layers."] = f"{place}."
        self.on_all_stages = tuple(
            name
            for name, child in self.named_children()
            if name != "layers" and not any(True for _ in child.parameters())
        )
        last.sort(key=lambda name: name == "output")
        # In the order of their use: of tied parameters, the first name counts.
        order = ["tok_embeddings", *first, "layers", *last]
        for name in [*dict.fromkeys(order), *(n for n in self._modules if n not in order)]:
            self._modules[name] = self._modules.pop(name)
        return sorted(first, key=lambda name: name != "tok_embeddings"), last

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        document_ids_BS: Any = None,
    ) -> Tensor:
        """Compute logits.

        Args:
            tokens_BS: Ids, int64, or on a later pipeline stage the previous stage's activations, (B, S, D).
            positions_BS: Positions, int64 (B, S) or (S,). None: 0 .. S-1.
            document_ids_BS: See InnerAttention. None: one document.

        Returns:
            Logits, (B, S, V), or on an earlier stage the activations, (B, S, D).
        """
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        options: dict[str, Any] = (
            {} if document_ids_BS is None else {"document_ids_BS": document_ids_BS}
        )
        positions_BS = positions_BS.expand(tokens_BS.shape[0], -1)
        is_first = self.tok_embeddings is not None
        self.__dict__["received"] = None if is_first else tokens_BS
        options["input_ids" if is_first else "inputs_embeds"] = tokens_BS
        called = self.base if self.output is None else self.hf
        result = called(position_ids=positions_BS, use_cache=False, **options)
        self.__dict__["received"] = None
        return result[0]

    def hf_name(self, name: str) -> str:
        """Return transformers' name of one of our parameters or buffers."""
        ours = next(prefix for prefix in self.hf_names if name.startswith(prefix))
        return self.hf_names[ours] + name.removeprefix(ours)

    def disk_name(self, name: str) -> str:
        """Return the name on disk of a parameter or buffer, {} for the number of an expert.

        Raises:
            UnsupportedModelError: a folder has it in a form that titan does not write.
        """
        parent, _, leaf = name.rpartition(".")
        owner = self.get_submodule(parent)
        is_half = f"{parent}.gate_up_proj" in self.inits and leaf in ("gate_proj", "up_proj")
        names = self._on_disk(f"{parent}.gate_up_proj" if is_half else name)
        if is_half:
            names = names[leaf == "up_proj" :: 2]
        if len(names) == 1:
            return names[0]
        if len(names) != getattr(owner, "total", 0):
            raise UnsupportedModelError(
                f"{name} is {len(names)} tensors on disk, such as {names[0]}"
            )
        return _numbered(names)

    def _lacks_folder(self, probe: list[Part]) -> str:
        """Return why linear attention has no names on disk, such as a convolution that is three there, or ""."""
        layers = [part for part in probe if part.recurrence is not None]
        try:
            for part in layers:
                for name, _ in part.module.named_parameters():
                    self.disk_name(f"{part.name}.{name}")
        except UnsupportedModelError as error:
            return str(error)
        return ""

    def _on_disk(self, name: str) -> list[str]:
        """Return the names on disk of the parts of a parameter of the model as transformers builds it."""
        number = re.match(r"layers\.(\d+)\.", name)
        key = re.sub(r"^layers\.\d+\.", "layers.0.", name)
        if key not in self.disk:
            stored: Any = self.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            tensor = {**stored._parameters, **stored._buffers}.get(leaf)
            shape = (stored.total, 2, 1) if tensor is None else tuple(tensor.shape)
            theirs = self.hf_name(name)
            self.disk[key] = number, disk_names(self.hf, {theirs: shape})[theirs]
        first, names = self.disk[key]
        if number is None or first[1] == number[1]:
            return names
        return [
            re.sub(rf"^(.*?\.){first[1]}\.", rf"\g<1>{number[1]}.", n, count=1) for n in names
        ]

    def _parts_of_expert(self, name: str) -> int:
        module: Any = self.get_submodule(name.rpartition(".")[0])
        return len(self._on_disk(name)) // len(module.down_proj)

    def init_std(self, name: str) -> Init:
        """Return the standard deviation of a parameter's initial weights, as transformers draws them, or values by seed. None: ones."""
        parent = name.rpartition(".")[0]
        return self.inits[name if name in self.inits else f"{parent}.gate_up_proj"]


def _by_use(ends: Ends, probe: list[Part]) -> Ends:
    """Return the modules before and after the blocks by their calls, which may come in another order than their names."""
    names = [part.name for part in probe]
    is_late = {name: n > names.index("layers.0") for n, name in enumerate(names)}
    both = [*ends[0], *ends[1]]
    first = [name for name in both if not is_late.get(name, name in ends[1])]
    return first, [name for name in both if name not in first]


def _numbered(names: list[str]) -> str:
    """Return the pattern of names that differ in a number: 0, 1, 2, ..."""
    first, second = (name.split(".") for name in names[:2])
    place = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    pattern = ".".join([*first[:place], "{}", *first[place + 1 :]])
    if [pattern.format(n) for n in range(len(names))] != names:
        raise UnsupportedModelError(f"{names[0]} and the others are not numbered by expert")
    return pattern


def _sizes(
    model: TransformersModel,
    source: ModelSource,
    ends: Ends,
    probe: list[Part],
    expert_modules: dict[str, Any],
) -> TransformersConfig:
    calls = [part.attention for part in probe if part.attention is not None]
    if not calls:
        raise UnsupportedModelError(
            "it has no attention at all, and titan reads its heads from there"
        )
    config = model.hf.config
    refuses = _refusals(model, source, calls, expert_modules)
    recurrent = sum(part.recurrence or 0 for part in probe)
    windows = {int(p.name.split(".")[1]): 1 for p in probe if p.recurrence is not None}
    heads: dict[int, HeadNumbers] = {}
    for part in probe:
        if part.attention is not None:
            inner: Any = part.module.inner_attention
            windows[int(part.name.split(".")[1])] = inner.window
            call = part.attention
            heads[int(part.name.split(".")[1])] = HeadNumbers(
                call.heads, call.kv_heads, call.head_dim
            )
    of_experts = {
        int(name.split(".")[1]): sum(p.numel() for p in module.parameters())
        for name, module in expert_modules.items()
    }
    one = next(iter(expert_modules.values()), None)
    total = one.total if one is not None else 0
    top_k = max((module.top_k for module in expert_modules.values()), default=0)
    embedding: Any = model.tok_embeddings
    share = {
        id(p): module.top_k / module.total
        for module in expert_modules.values()
        for p in module.parameters()
        if p.ndim == 3
    }
    matmuls = sum(
        p.numel() * share.get(id(p), 1) for p in model.layers.parameters() if p.ndim > 1
    )
    output: Any = model.output
    down = None if one is None else one.down_proj
    return TransformersConfig(
        source=source,
        dim=embedding.weight.shape[1],
        n_layers=len(model.layers),
        n_heads=max(heads.values()).heads,
        n_kv_heads=max(heads.values()).kv_heads,
        head_dim=max(call.head_dim for call in calls),
        ffn_dim=getattr(config, "intermediate_size", None) or 4 * embedding.weight.shape[1],
        vocab_size=embedding.weight.shape[0],
        tied_embeddings=output.weight is embedding.weight,
        num_experts=total,
        top_k=top_k,
        expert_dim=0 if down is None else down.numel() // total // embedding.weight.shape[1],
        first_modules=tuple(ends[0]),
        final_modules=tuple(ends[1]),
        params=sum(p.numel() for p in model.parameters()),
        params_of_blocks=tuple(
            sum(p.numel() for p in block.parameters()) for block in model.layers.values()
        ),
        experts_of_blocks=tuple(of_experts.get(n, 0) for n in range(len(model.layers))),
        matmul_params=int(matmuls) + output.weight.numel(),
        recurrent_flops=recurrent,
        heads_of_blocks=tuple(heads.get(n, HeadNumbers()) for n in range(len(model.layers))),
        windows=tuple(windows.get(n, 0) for n in range(len(model.layers))),
        table_positions=_table_positions(model),
        reach=model.__dict__.get("reach", 0),
        refuses=tuple(refuses.items()),
    )


def _refusals(
    model: TransformersModel,
    source: ModelSource,
    calls: list[Any],
    expert_modules: dict[str, Any],
) -> dict[str, str]:
    """Return the techniques that a model cannot have, with the reasons."""
    refuses: dict[str, str] = {}
    deaf = [type(call.module).__name__ for call in calls if not call.takes_documents]
    if deaf := [*deaf, *model.__dict__.get("without_documents", ())]:
        refuses["document_mask"] = (
            f"{deaf[0]} does not hand on the arguments that say where documents end"
        )
    if not all(call.module.inner_attention.causal for call in calls):
        refuses["context_parallel_degree"] = "its attention is not causal"
    if "longrope" in rope_types(json.loads(source.hf)):
        why = "the longest position of a batch decides its rotary frequencies (longrope), and ranks would decide differently"
        refuses |= dict.fromkeys(("context_parallel_degree", "reset_positions"), why)
    if expert_modules:
        refuses["moe_force_load_balance"] = "transformers' routers choose the experts"
    totals = sorted({module.total for module in expert_modules.values()})
    if len(totals) > 1:
        numbers = " and ".join(map(str, totals))
        refuses["expert_parallel_degree"] = (
            f"its layers have different numbers of experts, {numbers}"
        )
    return refuses


def _table_positions(model: TransformersModel) -> int:
    """Return the number of positions of a model that looks them up in a table, or 0."""
    limit = getattr(model.hf.config, "max_position_embeddings", None) or 0
    # Some tables have rows for padding before the first position.
    lengths = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    lengths -= {model.tok_embeddings.num_embeddings}  # pyrefly: ignore[missing-attribute]
    lengths |= {
        length for buffer in model.buffers() if buffer.ndim > 1 for length in buffer.shape
    }
    return limit if lengths & {*range(limit, limit + 8)} else 0
