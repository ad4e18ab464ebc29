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

from titan.parallel.module_kinds import modules_of

from . import attention, experts
from .adopt import Ends, adopt
from .build import Init, build, fill
from .config import HeadNumbers, ModelSource, TransformersConfig, rope_types
from .disk import disk_names
from .errors import UnsupportedModelError
from .plan import Part, derive_plan
from .probe import fails, fails_in_parts, place_by_use, run_once
from .recurrence import prepare_recurrences
from .sparse_attention import SparseAttention, prepare_sparse_attention, sparse_of

# Plans, and what models refuse, by source: a process builds a model several times, and trying takes three forward passes.
_LAYOUTS: dict[ModelSource, tuple[dict[str, str], dict[str, str]]] = {}


class TransformersModel(nn.Module):
    """Causal language model of transformers, from token ids to logits.

    Attributes:
        config: the sizes, as the module has them.
        tensor_plan: the tensor-parallel plan, a style for each module.
        hf_names: prefixes of our names and of transformers', for those of parameters.
        on_all_stages: children that every pipeline stage has: rotary embeddings, which have no parameters.
        inits: how each parameter begins.
        disk: names on disk by parameter, in the first block that was asked for, with its number.
        received: on a later pipeline stage, during a forward pass: its input.
        returns: number of values that a block returns as a tuple; 0: a tensor.
        reads_twice: name of a block that reads two hidden states, or "".
        reach: tokens before a token that a convolution needs.
        without_documents: classes of linear attention that the documents of a call do not reach.
    """

    # Not modules of this one: transformers' own, whose forward passes find our modules through stand-ins.
    hf: Any
    base: Any
    on_all_stages: tuple[str, ...]
    received: Any = None
    returns: int = 0
    reads_twice: str = ""
    reach: int = 0
    without_documents: tuple[str, ...] = ()

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        attention.register()
        experts.register()
        hf, inits = build(source)
        base = getattr(hf, hf.base_model_prefix, hf)
        self.__dict__.update(hf=hf, base=base)
        self.layers = nn.ModuleDict()
        self.hf_names: dict[str, str] = {}
        self.disk: dict[str, tuple[str, list[str]]] = {}
        ends = adopt(self, hf)
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
            block: Any = self.layers[_block_of(name)]
            block.traits = experts.traits_of_experts(block)
        prepare_sparse_attention(self)
        probe = run_once(self)
        ends, shared = place_by_use(self, ends, probe)
        self.config = _sizes(self, source, ends, probe, expert_modules)
        if source not in _LAYOUTS:
            plan, reason = self._try_heads(probe, dict(source.plan))
            refuses = {"tensor_parallel_degree": reason} if reason else {}
            _LAYOUTS[source] = plan, refuses | self._try_stages(ends, shared)
        plan, refuses = _LAYOUTS[source]
        self.tensor_plan, refuses = dict(plan), {**dict(self.config.refuses), **refuses}
        if reason := self._lacks_folder(probe):
            refuses |= dict.fromkeys(("initial_load_in_hf", "last_save_in_hf"), reason)
        object.__setattr__(self.config, "refuses", tuple(refuses.items()))

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

    def _try_stages(self, ends: Ends, shared: str) -> dict[str, str]:
        """Return why the model does not run as a pipeline stage, by the key of the layout.

        Args:
            ends: modules before and after the blocks.
            shared: name of a module that is called before and after the blocks, or "".
        """
        whole, why = self._modules, ""
        for lacking in (ends.first, ends.last):  # as a later stage, and as an earlier one
            self._modules = {**whole, **dict.fromkeys(lacking)}
            why = fails(self, ends.first) or why
        self._modules = whole
        if shared:
            why = f"{shared} is called before and after its blocks"
        if self.reads_twice:
            why = f"{self.reads_twice} reads two hidden states, and a stage sends one"
        return {"pipeline_parallel_degree": why} if why else {}

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        document_ids_BS: Any = None,
    ) -> Tensor:
        """Compute logits.

        Args:
            tokens_BS: ids, int64, or on a later pipeline stage the previous stage's activations, (B, S, D).
            positions_BS: positions, int64 (B, S) or (S,). None: 0 .. S-1.
            document_ids_BS: see InnerAttention. None: one document.

        Returns:
            Logits, (B, S, V), or on an earlier stage the activations, (B, S, D).
        """
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        is_first = self.tok_embeddings is not None
        options: dict[str, Any] = {"input_ids" if is_first else "inputs_embeds": tokens_BS}
        if document_ids_BS is not None:
            options["document_ids_BS"] = document_ids_BS
        called = self.base if self.output is None else self.hf
        positions_BS = positions_BS.expand(tokens_BS.shape[0], -1)
        self.received = None if is_first else tokens_BS
        result = called(position_ids=positions_BS, use_cache=False, **options)
        self.received = None
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
        fused = f"{parent}.gate_up_proj"
        if fused in self.inits and leaf in ("gate_proj", "up_proj"):
            names = self._on_disk(fused)[leaf == "up_proj" :: 2]
        else:
            names = self._on_disk(name)
        if len(names) == 1:
            return names[0]
        if len(names) != getattr(self.get_submodule(parent), "total", 0):
            raise UnsupportedModelError(
                f"{name} is {len(names)} tensors on disk, such as {names[0]}"
            )
        return _numbered(names)

    def _lacks_folder(self, probe: list[Part]) -> str:
        """Return why linear attention has no names on disk, such as a convolution that is three there, or ""."""
        try:
            for part in probe:
                if part.recurrence is not None:
                    for name, _ in part.module.named_parameters():
                        self.disk_name(f"{part.name}.{name}")
        except UnsupportedModelError as error:
            return str(error)
        return ""

    def _on_disk(self, name: str) -> list[str]:
        """Return the names on disk of the parts of a parameter of the model as transformers builds it."""
        number = _block_of(name)
        key = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        if key not in self.disk:
            parent, _, leaf = name.rpartition(".")
            stored: Any = self.get_submodule(parent)
            tensor = getattr(stored, leaf, None)
            shape = (stored.total, 2, 1) if tensor is None else tuple(tensor.shape)
            self.disk[key] = number, disk_names(self.hf, self.hf_name(name), shape)
        first, names = self.disk[key]
        if number == first:
            return names
        return [re.sub(rf"^(.*?\.){first}\.", rf"\g<1>{number}.", n, count=1) for n in names]

    def _parts_of_expert(self, name: str) -> int:
        module: Any = self.get_submodule(name.rpartition(".")[0])
        return len(self._on_disk(name)) // len(module.down_proj)

    def init_std(self, name: str) -> Init:
        """Return the standard deviation of a parameter's initial weights, as transformers draws them, or values by seed. None: ones."""
        parent = name.rpartition(".")[0]
        return self.inits[name if name in self.inits else f"{parent}.gate_up_proj"]


def _block_of(name: str) -> str:
    """Return the number of the block that a name is in, or ""."""
    top, _, rest = name.partition(".")
    return rest.partition(".")[0] if top == "layers" else ""


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
    """Return the sizes of a model, from its modules and their calls."""
    calls = [part.attention for part in probe if part.attention is not None]
    if not calls:
        raise UnsupportedModelError(
            "it has no attention at all, and titan reads its heads from there"
        )
    embedding: Any = model.tok_embeddings
    output: Any = model.output
    vocab_size, dim = embedding.weight.shape
    heads = dict.fromkeys(model.layers, HeadNumbers())
    windows = dict.fromkeys(model.layers, 0)
    windows |= {_block_of(part.name): 1 for part in probe if part.recurrence is not None}
    for part in probe:
        if (call := part.attention) is not None:
            block, inner = _block_of(part.name), call.module.inner_attention
            windows[block] = inner.window
            if (sparse := sparse_of(call.module)) is not None:
                windows[block] = sparse.keys * sparse.block
            heads[block] = HeadNumbers(call.heads, call.kv_heads, call.head_dim)
    of_experts = dict.fromkeys(model.layers, 0)
    share: dict[Any, float] = {}  # of a parameter's numbers that act on one token
    total = top_k = expert_dim = 0
    for name, module in expert_modules.items():
        of_experts[_block_of(name)] = _count(module)
        stacks = (p for p in module.parameters() if p.ndim == 3)
        share |= dict.fromkeys(stacks, module.top_k / module.total)
        total = total or module.total
        top_k = max(top_k, module.top_k)
        expert_dim = expert_dim or module.down_proj.numel() // total // dim
    matrices = (p for p in model.layers.parameters() if p.ndim > 1)
    matmuls = sum(p.numel() * share.get(p, 1) for p in matrices)
    most = max(heads.values())
    # A layer that has no indexer reads another layer's choice.
    choosing = [s for s in modules_of(model, SparseAttention).values() if s.width]
    index_heads = model.hf.config.to_dict().get("index_n_heads", 0)
    return TransformersConfig(
        source=source,
        dim=dim,
        n_layers=len(model.layers),
        n_heads=most.heads,
        n_kv_heads=most.kv_heads,
        head_dim=max(call.head_dim for call in calls),
        ffn_dim=getattr(model.hf.config, "intermediate_size", None) or 4 * dim,
        vocab_size=vocab_size,
        tied_embeddings=output.weight is embedding.weight,
        num_experts=total,
        top_k=top_k,
        expert_dim=expert_dim,
        first_modules=tuple(ends.first),
        final_modules=tuple(ends.last),
        params=_count(model),
        params_of_blocks=tuple(map(_count, model.layers.values())),
        experts_of_blocks=tuple(of_experts.values()),
        matmul_params=int(matmuls) + output.weight.numel(),
        recurrent_flops=sum(part.recurrence or 0 for part in probe),
        index_width=sum(sparse.width for sparse in choosing),
        index_params=sum(
            p.numel() for n, p in model.named_parameters() if ".indexer." in n and p.ndim > 1
        ),
        index_heads=index_heads,
        choices=sum(s.keys * (index_heads if s.block > 1 else 1) for s in choosing),
        heads_of_blocks=tuple(heads.values()),
        windows=tuple(windows.values()),
        table_positions=_table_positions(model),
        reach=model.reach,
        refuses=tuple(_refusals(model, source, calls, expert_modules).items()),
    )


def _count(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in module.parameters())


def _refusals(
    model: TransformersModel,
    source: ModelSource,
    calls: list[Any],
    expert_modules: dict[str, Any],
) -> dict[str, str]:
    """Return the techniques that a model cannot have, with the reasons."""
    refuses: dict[str, str] = {}
    deaf = [type(call.module).__name__ for call in calls if not call.takes_documents]
    if deaf := [*deaf, *model.without_documents]:
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
