"""Multi-token prediction against its formula, written out: what modules read and predict, and their part of the loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.operations import Watch
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.config.model import family
from titan.config.schema import JobConfig
from titan.data.packing import IGNORED, Batch
from titan.losses.loss import LossSum
from titan.parallel import build_mesh, initialize
from titan.tasks.next_token import MTPLoss


def sizes(name: str, count: int = 2) -> Any:
    return dataclasses.replace(family(name).FLAVORS["tiny"], n_layers=2, num_mtp_modules=count)


def test_what_modules_read_and_predict() -> None:
    """Two documents: 1 2 3 and 4 5 6 7, of which 8 comes after the row. The label of 5 is masked."""
    labels = torch.tensor([[2, 3, IGNORED, 5, IGNORED, 7, 8]])
    batch = Batch(
        tokens_BS=torch.tensor([[1, 2, 3, 4, 5, 6, 7]]),
        labels_BS=labels,
        document_ids_BS=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]),
    ).with_mtp_targets(2)
    assert batch.mtp_targets_BSM is not None and batch.mtp_labels_BSM is not None
    read, predicted = (t[0].T.tolist() for t in (batch.mtp_targets_BSM, batch.mtp_labels_BSM))
    x = IGNORED
    assert [row[: 6 - n] for n, row in enumerate(read)] == [[2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7]]
    # The label of 3 belongs to the second document, and is masked as for the next token. So are those that would come from beyond.
    assert predicted == [[3, x, x, x, 7, 8, x], [x, x, x, 7, 8, x, x]]


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3", "qwen3"])
def test_counts(name: str) -> None:
    config, plain = sizes(name), sizes(name, 0)
    with torch.device("meta"):
        model = family(name).build_model(config)
    counts = {key: p.numel() for key, p in model.named_parameters()}
    assert sum(counts.values()) == config.num_params
    modules = sum(n for key, n in counts.items() if key.startswith(("layers.2.", "layers.3.")))
    assert config.num_params - plain.num_params == modules
    # A block, a projection and the output layer, of twice the parameters of a matrix product, forward and back.
    matrices = modules - 2 * (config.num_block_norm_params + 3 * config.dim)
    block = config.attention_flops_per_token(64, causal=False) // 4
    if name != "deepseek_v3":  # where tokens meet some of the experts
        more = 6 * (matrices + 2 * config.num_embedding_params) + 2 * block
        assert config.flops_per_token(64) - plain.flops_per_token(64) == more


@pytest.mark.parametrize("chunk", [0, 3, 4])
def test_all_tokens_share_a_gradient_of_the_output_layer(chunk: int) -> None:
    """And it is the sum of those that autograd finds with torch's own loss, as are the input's and the value."""
    torch.manual_seed(0)
    output = torch.nn.Linear(16, 500, bias=False)
    loss = MTPLoss(LossSum(chunk, output=output), 0.3)
    x_BSD = torch.randn(6, 4, 16, requires_grad=True)
    labels_BSN = torch.randint(500, (2, 4, 3)).index_fill(1, torch.tensor([2]), IGNORED)
    made = []
    with Watch(lambda func, _, out: made.append((str(func), getattr(out, "shape", ())))):
        value = loss(x_BSD, labels_BSN)
    # The first chunk writes the sum.
    assert not [name for name, shape in made if "zeros" in name and shape == (500, 16)]
    (value / 7).backward()
    found = [x_BSD.grad, output.weight.grad]
    parts = [
        F.cross_entropy(
            output(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        for x, y in zip(x_BSD.split(2), labels_BSN.unbind(-1), strict=True)
    ]
    total = (parts[0] + 0.3 * (parts[1] + parts[2]) / 2) / 7
    expected = torch.autograd.grad(total, [x_BSD, output.weight])
    torch.testing.assert_close(found, [*expected], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(value, parts[0])
    torch.testing.assert_close(loss.means[-1], (parts[1] + parts[2]).detach() / 2)


def written_out(model: Any, tokens: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of the next token, and the mean of those of two modules, each a sum over a row of S + 1 tokens."""
    config, length = model.config, tokens.shape[1]

    def normed(norm: Any, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * norm.weight

    cos_sin = model.rotary_cos_sin(None, length, tokens.device)
    x = F.embedding(tokens, model.tok_embeddings.weight)
    for n in range(config.n_layers):
        x = model.layers[str(n)](x, cos_sin, None)
    h, sums = normed(model.norm, x), []
    for ahead in range(3):
        if ahead:
            module = model.layers[str(config.n_layers + ahead - 1)]
            # Beyond the row is nothing: any tokens will do, for places that nobody asks for.
            shifted = F.pad(row, (0, length))[:, ahead : ahead + length]
            token = F.embedding(shifted, model.tok_embeddings.weight)
            both = torch.cat([normed(module.enorm, token), normed(module.hnorm, h)], dim=-1)
            h = normed(
                module.head_norm, module.block(both @ module.eh_proj.weight.T, cos_sin, None)
            )
        logits = (h @ model.output.weight.T)[:, : length - ahead]
        targets = row[:, ahead + 1 : length + 1]
        sums.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return sums[0], (sums[1] + sums[2]) / 2


def differences(name: str, chunk_output: bool) -> dict[str, float]:
    """Return how far a step of one process is from what is written out, relative: loss, validation's loss, each gradient."""
    overrides = {"n_layers": 2, "num_mtp_modules": 2, "mtp_coeff": 0.5}
    # It has a gradient and no value in the loss.
    overrides |= {"sequence_balance_coeff": 0.0} if name == "deepseek_v3" else {}
    config = JobConfig.model_validate(
        {
            "model": {"name": name, "flavor": "tiny", "overrides": overrides},
            "training": {"mixed_precision_param": "float32", "local_batch_size": 2},
            "loss": {"chunk_output": chunk_output, "chunk_tokens": 20},
        }
    )
    step: Any = build_step(config, build_mesh("cpu"))
    (model,) = step.model_parts
    row = torch.randint(2048, (2, 25), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens_BS=row[:, :-1], labels_BS=row[:, 1:])
    evaluated, _ = step.evaluate([batch])
    loss = step._forward_backward(step.to_local(batch), torch.tensor(1.0), is_last=True)
    gradients = {key: p.grad for key, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    first, further = written_out(model, row[:, :-1], row)
    (first + 0.5 * further).backward()
    pairs: dict[str, Any] = {
        key: (gradients[key], p.grad) for key, p in model.named_parameters()
    }
    pairs |= {"loss": (loss, first.detach()), "evaluated": (evaluated, first.detach())}
    [mean] = step.loss_sum.means
    pairs |= {"further": (mean, further.detach())}
    norm = torch.linalg.vector_norm
    return {key: float(norm(a - b) / norm(b)) for key, (a, b) in pairs.items()}


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
@pytest.mark.parametrize("chunk_output", [True, False])
def test_loss_and_gradients_are_those_of_the_formula(
    name: str, chunk_output: bool, pool: Pool
) -> None:
    [found] = pool.run(1, differences, name, chunk_output)
    assert len(found) > 30 and max(found.values()) < 1e-5, found


def test_modules_without_their_tokens_do_not_run() -> None:
    """As in generation: the logits are those of the model alone."""
    model = family("llama3").build_model(sizes("llama3"))
    initialize(model, seed=0, std_of=model.init_std)
    tokens = torch.arange(20)[None]
    further = torch.stack([tokens.roll(-1), tokens.roll(-2)], dim=-1)
    with torch.no_grad():
        together = model(tokens, mtp_targets_BSM=further)
        torch.testing.assert_close(together[:1], model(tokens))
    assert len(together) == 3
