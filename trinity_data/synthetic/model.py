"""`synthetic://qwen2-1m`: a Qwen2 of about a million parameters with random weights, as a Hugging Face folder.

Its tokenizer cuts text as every Qwen2 tokenizer does, since `AutoTokenizer` insists on that for this architecture: bytes
where no word fits, a token for every digit. Any text comes back unchanged once it is in Unicode's normal form C.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2Tokenizer

from trinity_data.synthetic.folder import make_once

MODEL_VERSION = 2
VOCAB_SIZE = 512
"""At most; fewer when the corpus holds fewer words."""
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception(\"unknown role '\" + message['role'] + \"'; known: assistant, system, user\") }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def write_model(folder: Path, *, corpus: Iterable[str], seed: int) -> Path:
    """`folder` with config, weights, tokenizer and chat template; found again when made from the same parameters.

    The tokenizer learns its words from `corpus`. The seed draws the weights.
    """
    texts = list(corpus)
    parameters: dict[str, str | int] = {"version": MODEL_VERSION, "seed": seed, "corpus": _digest(texts)}
    return make_once(folder, parameters, partial(_fill, texts=texts, seed=seed))


def _digest(texts: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _fill(folder: Path, *, texts: list[str], seed: int) -> None:
    tokenizer = build_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    write_weights(folder, tokenizer, seed)


def build_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """Qwen2's own rules of cutting text, with the words of `texts` merged, the commonest first."""
    rules = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE())
    learner.normalizer, learner.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # often enough that each role is one token in the chat template
    roles = ["system", "user", "assistant"] * 1000
    learner.train_from_iterator([*texts, *roles], trainer)
    learnt = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token=None,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        add_prefix_space=False,
        extra_special_tokens=list(SPECIAL_TOKENS[1:2]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def write_weights(folder: Path, tokenizer: Qwen2Tokenizer, seed: int) -> None:
    """Configuration and random float32 weights for the tokenizer's vocabulary, initialised as Qwen2 is."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.06,  # the usual 0.02 takes twice the warm-up steps at this width
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})


def _random_weights(config: Qwen2Config, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """With numpy, because importing torch takes as long as all the rest."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in _shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shape, np.float32)
        elif name.endswith(".bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            weights[name] = random.standard_normal(shape, np.float32) * np.float32(config.initializer_range)
    return weights


def _shapes(config: Qwen2Config) -> dict[str, tuple[int, ...]]:
    """Of every tensor, under the names that Qwen2ForCausalLM gives them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for part, width in (("q", hidden), ("k", keys), ("v", keys)):
        layer |= {f"self_attn.{part}_proj.weight": (width, hidden), f"self_attn.{part}_proj.bias": (width,)}
    layer |= {
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}
