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

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from trinity_data.synthetic.folder import make_once

MODEL_VERSION = 1
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

    The tokenizer learns its words from `corpus`. The seed draws the weights and leaves torch's own generator alone.
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
    build_model(tokenizer, seed).save_pretrained(folder)


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


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Random float32 weights for the tokenizer's vocabulary."""
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
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
