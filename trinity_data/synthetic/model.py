"""`synthetic://qwen2-1m`: a Qwen2 of about a million parameters with random weights,
as a Hugging Face folder.

Its tokenizer cuts text as every Qwen2 tokenizer does, since `AutoTokenizer` insists on that for this
architecture: bytes where no word fits, a token for every digit. Any text comes back unchanged once it is in
Unicode's normal form C.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trinity_data.synthetic.folder import Parameters, make_once

MODEL_VERSION = 3
VOCAB_SIZE = 512
"""At most; fewer when the corpus holds fewer words."""
MAX_POSITIONS = 2048
# how the tokenizers of Qwen2 part text before merging: contractions, words, single digits,
# signs, line ends, spaces
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,  # the usual 0.02 takes twice the warm-up steps at this width
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
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
    """`folder` with config, weights, tokenizer and chat template.

    Found again when made from the same parameters. The tokenizer learns its words from `corpus`. The
    seed draws the weights.
    """
    texts = list(corpus)
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode() + b"\0")

    def fill(draft: Path) -> None:
        tokenizer = train_tokenizer(texts)
        write_tokenizer(draft, tokenizer)
        write_weights(draft, vocab_size=tokenizer.get_vocab_size(), seed=seed)

    parameters: Parameters = {"version": MODEL_VERSION, "seed": seed, "corpus": digest.hexdigest()}
    return make_once(folder, parameters, fill)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Qwen2's own rules of cutting text, with the words of `texts` merged, the commonest first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # often enough that each role is one token in the chat template
    roles = ["system", "user", "assistant"] * 1000
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The files from which `AutoTokenizer` makes a Qwen2Tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": END_OF_TURN,
            "pad_token": PADDING,
            "unk_token": None,
            "extra_special_tokens": list(SPECIAL_TOKENS[1:2]),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
        },
    )


def write_weights(folder: Path, *, vocab_size: int, seed: int) -> None:
    """Configuration and random float32 weights, initialized as Qwen2 is."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {
        "eos_token_id": SPECIAL_TOKENS.index(END_OF_TURN),
        "pad_token_id": SPECIAL_TOKENS.index(PADDING),
    }
    config = _CONFIG | {"vocab_size": vocab_size}
    _write_json(folder / "config.json", config | ends)
    _write_json(folder / "generation_config.json", ends)
    save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _random_weights(config: Mapping[str, Any], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """With numpy: importing torch, or what of transformers imports it, would take as long as all the rest."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in _shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shape, np.float32)
        elif name.endswith(".bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            weights[name] = random.standard_normal(shape, np.float32) * np.float32(
                config["initializer_range"]
            )
    return weights


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor, under the names that Qwen2ForCausalLM gives them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
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
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}
