"""gpt-oss against transformers' implementation: logits, published counts, and what its operations count."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from titan.huggingface.load import HFModel
from titan.models.gpt_oss import FLAVORS, build_model
from titan.models.gpt_oss.huggingface import hf_config
from titan.parallel.init_weights import initialize

transformers = pytest.importorskip("transformers")
# A context that YaRN stretches, and windows, both shorter than the sequence; experts that the limit clamps.
SMALL = dataclasses.replace(
    FLAVORS["tiny"], n_layers=3, original_context=32, window=24, swiglu_limit=1.5
)


def test_logits_equal_transformers() -> None:
    model = build_model(SMALL)
    # Neither norms of ones nor biases and sinks of zeros: the test would miss them otherwise.
    initialize(model, seed=1, std_of=lambda name: 0.5 if "norm" in name else 0.2)
    for module in model.modules():
        getattr(module, "reset_buffers", lambda: None)()  # pyrefly: ignore[not-callable]
    form = HFModel.of("gpt_oss", SMALL)
    weights = dict(model.named_parameters())
    twin = transformers.GptOssForCausalLM(transformers.GptOssConfig(**hf_config(SMALL))).eval()
    twin.load_state_dict(
        {
            name: form.joined(tensor.ours, [weights[ours].detach() for ours in tensor.ours])
            for name, tensor in form.on_disk.items()
        }
    )
    tokens = torch.randint(SMALL.vocab_size, (2, 100))
    with torch.no_grad():
        expected = twin(tokens).logits
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
        # The windows and the stretched context are seen: without either, logits are others.
        for change in ({"window": 0}, {"rope_factor": 0.0}, {"swiglu_limit": 7.0}):
            # pyrefly: ignore[bad-argument-type]
            other = build_model(dataclasses.replace(SMALL, **change))
            other.load_state_dict(model.state_dict())
            assert (other(tokens) - expected).abs().max() > 1e-2, change
