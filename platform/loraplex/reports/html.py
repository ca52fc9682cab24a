"""A report as one HTML file: no script, nothing loaded, readable in light, dark and print."""

from collections.abc import Iterable, Sequence
from html import escape

from loraplex.reports.chart import chart
from loraplex.reports.plots import LinePlot, Note, Report, Section, TextTable, line_table

STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1f2328;--soft:#59636e;--edge:#d8dee4;
--card:#f6f8fa;--warning:#9a6700;--critical:#c4262e}
@media (prefers-color-scheme:dark){:root{--ground:#0d1117;--ink:#e6edf3;--soft:#9198a1;
--edge:#30363d;--card:#161b22;--warning:#d29922;--critical:#ff7b72}}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:44px 0 6px}
p{margin:0 0 12px;max-width:80ch}.soft{color:var(--soft)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px;margin:22px 0}
.facts div{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 14px}
.facts dt{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.facts dd{margin:0;font-size:17px;line-height:1.3;font-weight:600}
.pair{display:grid;grid-template-columns:minmax(0,3fr) minmax(0,2fr);gap:26px;align-items:start}
.pair svg{width:100%;height:auto;min-width:500px}.wide{overflow-x:auto}
.above{grid-template-columns:minmax(0,1fr)}.above svg{max-width:700px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:5px 9px;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child,.prose th,.prose td{text-align:left}
.prose td{white-space:normal;vertical-align:top}.prose td:last-child{min-width:22ch}
.notes{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:14px}
.note{background:var(--card);border:1px solid var(--edge);border-left:4px solid var(--level);
border-radius:8px;padding:12px 16px;break-inside:avoid}
.note h3{font-size:16px;margin:0}.note h3 b{color:var(--level);font-size:12px;font-weight:600;
text-transform:uppercase;letter-spacing:.04em;margin-left:8px}
.note p{margin:6px 0}.note dl{display:grid;grid-template-columns:1fr auto;gap:2px 14px;
margin:8px 0 0;font-size:13px;font-variant-numeric:tabular-nums}
.note dt{color:var(--soft)}.note dd{margin:0;text-align:right}
@media (max-width:900px){.pair{grid-template-columns:minmax(0,1fr)}}
@media print{.pair{grid-template-columns:minmax(0,1fr)}h2,.pair{break-inside:avoid}}
"""
COLUMNS_BESIDE = 6
"""Of a table that stands beside its plot; a wider one stands below."""


def render(report: Report) -> str:
    """The whole file."""
    title = escape(report.title)
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'\">"
            f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
            f'<h1>{title}</h1><p class="soft">{escape(report.lead)}</p>',
            *_facts(report.facts),
            *(part for section in report.sections for part in _section(section)),
            *_settings(report.settings),
            "</main></body></html>\n",
        )
    )


def _facts(facts: Sequence[tuple[str, str]]) -> Iterable[str]:
    if facts:
        yield '<dl class="facts">'
        for label, value in facts:
            yield f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        yield "</dl>"


def _section(section: Section) -> Iterable[str]:
    yield f"<section><h2>{escape(section.title)}</h2>"
    if section.text:
        yield f"<p>{escape(section.text)}</p>"
    if section.notes:
        notes = "".join("".join(_note(note)) for note in section.notes)
        yield f'<div class="notes">{notes}</div>'
    table = section.table
    if table is None and isinstance(section.plot, LinePlot):
        table = line_table(section.plot)
    if section.plot is None:
        yield f'<div class="wide">{_table(table)}</div>' if table else ""
    else:
        drawn = chart(section.plot, title=section.title)
        has_room = table is None or len(table.columns) <= COLUMNS_BESIDE
        kind = "pair" if has_room else "pair above"
        parts = (f'<div class="wide">{part}</div>' for part in (drawn, _table(table)))
        yield f'<div class="{kind}">{"".join(parts)}</div>'
    yield "</section>"


def _note(note: Note) -> Iterable[str]:
    yield f'<article class="note" style="--level:var(--{note.level})">'
    yield f"<h3>{escape(note.title)}<b>{note.level}</b></h3>"
    yield f'<p class="soft">{escape(note.source)}</p>' if note.source else ""
    yield f"<p>{escape(note.text)}</p><p><b>{escape(note.advice)}</b></p>"
    if note.figures:
        yield "<dl>"
        yield from (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in note.figures)
        yield "</dl>"
    yield "</article>"


def _settings(settings: Sequence[tuple[str, str]]) -> Iterable[str]:
    if settings:
        yield "<section><h2>Made with</h2>"
        yield _table(TextTable(("setting", "value"), settings, is_prose=True))
        yield "</section>"


def _table(table: TextTable | None) -> str:
    if table is None:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    kind = ' class="prose"' if table.is_prose else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
