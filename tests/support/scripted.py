# ruff: noqa: RUF001 (characters of DeepSeek's tokens)
"""Hugging Face folders whose text is known beforehand: the last token alone decides the next one.

Attention and feed-forward write zeros, the embedding is the identity, and the output layer is a table. The tokenizers, templates and end tokens have the shapes
of Llama 3, Qwen 3, gpt-oss, Gemma 3, Mistral and DeepSeek; the model is a Llama of one block.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TEXT = "how are you today my friend the quick brown fox jumps over lazy dogs and cats while rain falls down"


@dataclass(frozen=True)
class Shape:
    """What a family's folder says. ends: of generation_config.json. adds_bos: by a post-processor, by the key, or not at all."""

    bos: str
    eos: str
    specials: list[str]
    ends: list[str]
    template: str
    names: dict[str, Any] = field(default_factory=dict)
    pieces: str = "bytes"  # "bytes", "metaspace" or "replace"
    adds_bos: str = ""  # "post", "key" or ""


_TURN = "{% for m in messages %}"
SHAPES = {
    "llama3": Shape(
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        "{{ bos_token }}" + _TURN + "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        adds_bos="post",
    ),
    "qwen3": Shape(
        "<|endoftext|>",
        "<|im_end|>",
        ["<|im_start|>"],
        ["<|im_end|>", "<|endoftext|>"],
        _TURN + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        {"bos_token": None, "pad_token": "<|endoftext|>", "add_bos_token": False},
    ),
    "gpt_oss": Shape(
        "<|startoftext|>",
        "<|return|>",
        ["<|endoftext|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
        ["<|return|>", "<|endoftext|>", "<|call|>"],
        _TURN + "{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        {"pad_token": "<|endoftext|>"},
    ),
    "gemma3": Shape(
        "<bos>",
        "<eos>",
        ["<start_of_turn>", "<end_of_turn>"],
        ["<eos>", "<end_of_turn>"],
        "{{ bos_token }}" + _TURN + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        {"pad_token": "<pad>", "add_bos_token": True},
        pieces="replace",
        adds_bos="post",
    ),
    "mistral": Shape(
        "<s>",
        "</s>",
        ["[INST]", "[/INST]"],
        ["</s>"],
        "{{ bos_token }}" + _TURN + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        pieces="metaspace",
        adds_bos="post",
    ),
    "deepseek": Shape(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ["<｜User｜>", "<｜Assistant｜>"],
        ["<｜end▁of▁sentence｜>"],
        "{{ bos_token }}" + _TURN + "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% else %}{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        {"add_bos_token": True, "add_eos_token": False},
        adds_bos="key",
    ),
}  # fmt: skip


def build_tokenizer(shape: Shape) -> Any:
    """Return a small tokenizer of the library `tokenizers`, with words of TEXT as tokens."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    specials = ["<pad>", "<unk>", *dict.fromkeys([shape.bos, shape.eos, *shape.specials, *shape.ends])]  # fmt: skip
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if shape.pieces == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        specials += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
    spelled = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if shape.pieces == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([*spelled, decoders.Strip(" ", 1, 0)])
    elif shape.pieces == "replace":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        tokenizer.decoder = decoders.Sequence(spelled)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([f"{TEXT}\n"] * 3, trainer=trainer)
    # The bytes of a fallback are ordinary tokens, which text may hold.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if not t["content"].startswith("<0x")]  # fmt: skip
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>")])
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = byte_level
    if shape.adds_bos == "post":
        front = processors.TemplateProcessing(
            single=f"{shape.bos} $A",
            pair=f"{shape.bos} $A {shape.bos} $B",
            special_tokens=[(shape.bos, tokenizer.token_to_id(shape.bos))],
        )
        tokenizer.post_processor = front
        if shape.pieces == "bytes":
            tokenizer.post_processor = processors.Sequence([byte_level, front])
    return tokenizer


def write_folder(
    folder: Path,
    shape: Shape,
    *,
    scripts: dict[str, list[str]],
    positions: int = 256,
    **config: Any,
) -> Any:
    """Write a folder, and return its tokenizer.

    Args:
        scripts: by the token that an answer follows (its text in the vocabulary), the tokens of the answer. A token that no script has is followed by the eos.
        config: further keys of config.json.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(shape)
    tokenizer.save(str(folder / "tokenizer.json"))
    number = {text: tokenizer.token_to_id(text) for text in tokenizer.get_vocab()}
    size = tokenizer.get_vocab_size()
    width = -(-size // 16) * 16
    following = torch.full((size,), number[shape.eos])
    for begin, answer in scripts.items():
        for before, after in zip([begin, *answer], answer, strict=False):
            following[number[before]] = number[after]
    table = torch.randn(size, width, generator=torch.Generator().manual_seed(1)) * 0.1
    table[following, torch.arange(size)] = 1.0
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.eye(size, width),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": table,
        f"{layer}input_layernorm.weight": torch.ones(width),
        f"{layer}post_attention_layernorm.weight": torch.ones(width),
        f"{layer}mlp.gate_proj.weight": torch.zeros(16, width),
        f"{layer}mlp.up_proj.weight": torch.zeros(16, width),
        f"{layer}mlp.down_proj.weight": torch.zeros(width, 16),
        **{
            f"{layer}self_attn.{name}_proj.weight": torch.zeros(width, width) for name in "qkvo"
        },
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": size,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": number[shape.bos],
        "eos_token_id": number[shape.eos],
    }
    ends = [number[name] for name in shape.ends]
    generation = {
        "bos_token_id": number[shape.bos],
        "eos_token_id": ends if len(ends) > 1 else ends[0],
    }
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names |= {"bos_token": shape.bos, "eos_token": shape.eos, **shape.names}
    files: Any = {"config.json": facts | config, "generation_config.json": generation}
    files["tokenizer_config.json"] = names
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1))
    (folder / "chat_template.jinja").write_text(shape.template)
    return tokenizer
