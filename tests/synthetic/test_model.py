from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trinity_data.synthetic.model import train_tokenizer, write_model
from trinity_data.synthetic.taskset import write_taskset

TEXTS = [
    "Ann has 7 apples. She buys 5 more. How many apples does Ann have now?",
    "7+5=<<7+5=12>>12\n#### 12",
    "Janet\u2019s ducks lay 16 eggs per day at $2.50 each,  i.e. 1,000% more",
    "naïve 数学 \U0001f986 \t\r\n end ",
    "<<48/2=24>>24 clips",
    "",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = write_taskset(tmp_path_factory.mktemp("tasks") / "gsm8k", seed=0, num_train=600, num_test=64)
    return (folder / "train.jsonl").read_text().replace("\\n", "\n").splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", corpus=corpus, seed=0)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_real_gsm8k_comes_back_unchanged(tokenizer: Any) -> None:
    real = Path(__file__).parents[3] / "shared" / "gsm8k" / "test.jsonl"
    if not real.exists():
        pytest.skip("real GSM8K is not beside the repository")
    lines = real.read_text(encoding="utf-8").splitlines()[:300]
    assert [tokenizer.decode(ids) for ids in tokenizer(lines).input_ids] == lines


def test_every_digit_is_a_token_and_none_hides_in_another(tokenizer: Any) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer("2048+90=").input_ids] == list("2048+90=")
    with_digits = [token for token in tokenizer.get_vocab() if any(c in "0123456789" for c in token)]
    assert sorted(with_digits) == list("0123456789")


def test_words_of_the_corpus_are_single_tokens(tokenizer: Any) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer("Ann has 7 apples. How many").input_ids]
    assert pieces == ["Ann", " has", " ", "7", " apples", ".", " How", " many"]


def test_the_vocabulary_has_no_row_without_a_token(folder: Path, tokenizer: Any) -> None:
    assert len(tokenizer) <= 1024
    assert load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape[0] == len(tokenizer)


def test_the_chat_template_writes_turns_and_opens_the_answer(tokenizer: Any) -> None:
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    question = [{"role": "user", "content": TEXTS[0]}]
    opened = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert opened == f"<|im_start|>user\n{TEXTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    # 8 tokens around a question of 20
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 8 + len(tokenizer(TEXTS[0]).input_ids) == 28


def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role 'robot'; known: assistant, system, user"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "hi"}], tokenize=False)


def test_end_of_turn_ends_generation_and_is_not_padding(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_text_is_normalised_as_qwen2_does(tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer("e\u0301").input_ids) == "\u00e9"


def test_the_model_has_about_a_million_float32_parameters_and_tied_embeddings(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.config.max_position_embeddings == 2048


def test_the_same_seed_and_corpus_give_the_same_files_in_another_process(
    folder: Path, corpus: list[str], tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(corpus))
    program = (
        "import pathlib, sys; from trinity_data.synthetic.model import write_model; "
        "p = pathlib.Path(sys.argv[1]);write_model(p / 'again', "
        "corpus=(p / 'corpus.txt').read_text().split('\\n'), seed=0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_weights_are_drawn_as_qwen2_draws_its_own(folder: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = type(model)(model.config)
    drawn = dict(model.named_parameters())
    for name, parameter in fresh.named_parameters():
        # both are draws: their means and deviations differ by a few standard errors,
        # and not at all where nothing is drawn
        spread, size = parameter.std().item(), parameter.numel()
        mean_error, std_error = spread * math.sqrt(2 / size), spread / math.sqrt(size)
        assert drawn[name].mean().item() == pytest.approx(parameter.mean().item(), abs=5 * mean_error), name
        assert drawn[name].std().item() == pytest.approx(spread, abs=5 * std_error), name


def test_another_seed_gives_other_weights(folder: Path, corpus: list[str], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", corpus=corpus, seed=1)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(
        load_file(other / "model.safetensors")[name], load_file(folder / "model.safetensors")[name]
    )


def test_a_text_without_repeats_still_makes_a_tokenizer() -> None:
    tokenizer = train_tokenizer(["x"])
    assert tokenizer.decode(tokenizer.encode("Ann has 7").ids) == "Ann has 7"


def test_it_is_made_without_torch() -> None:
    program = "import sys; import trinity_data.synthetic.model; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
