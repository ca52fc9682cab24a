import io

from rich.console import Console

from loraplex.progress import StageBars


def test_every_stage_stays_visible_and_full() -> None:
    output = io.StringIO()
    with StageBars(Console(file=output, width=80)) as progress:
        progress.start("Downloading", total=10)
        progress.update(4)
        progress.start("Unpacking")
    lines = output.getvalue().splitlines()
    assert ["Downloading" in line and "100%" in line for line in lines if line] == [True, False]
    assert "Unpacking" in lines[-1]
    assert "100%" in lines[-1]


def test_a_stage_that_failed_is_not_shown_as_full() -> None:
    output = io.StringIO()
    try:
        with StageBars(Console(file=output, width=80)) as progress:
            progress.start("Downloading", total=10)
            progress.update(4)
            raise OSError
    except OSError:
        pass
    assert "40%" in output.getvalue()
