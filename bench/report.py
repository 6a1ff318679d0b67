# SPDX-License-Identifier: Apache-2.0
"""summary.md, report.html and the plots of one run, or of several side by side."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path

from matplotlib.figure import Figure

from bench.errors import BenchError
from bench.folder import StoredRun, write_atomically
from bench.plots import FIGURES, series_of, style
from bench.tables import (
    Table,
    as_markdown,
    machine_line,
    published_tables,
    result_tables,
    settings_line,
)

__all__ = ["write_report"]

DPI = 130
NOTES = (
    "Output tokens/s is taken in the steady window: all slots busy, or the whole run in an open "
    "loop. A speed-up is a ratio within one repeat; the range is that of the repeats. That of the "
    "whole run also counts its end, where slots stay empty. Tau is "
    "tokens committed over verify steps, the bonus token included. TPOT is (E2E - TTFT) / "
    "(tokens - 1); the time between chunks is another quantity, for a speculative server sends "
    "several tokens in one. 'same text' counts answers equal to the baseline's; in 16-bit floats "
    "two batch shapes may break a near-tie differently. cv: coefficient of variation over the "
    "repeats, 'noisy' above 10 %. Latencies are means over the repeats of each one's percentile; "
    "their ranges are in summary.json."
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem;
  padding: 0 1.2rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.84rem; }
th, td { padding: 0.28rem 0.6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e3e3e3; }
th { background: #f5f5f5; } td:nth-child(2), th:nth-child(2) { text-align: left; }
tr.next td { border-top: 2px solid #aaa; }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: 0.8rem; }
.note { color: #555; font-size: 0.9rem; max-width: 60rem; } .bad { color: #b00020; }
"""


def write_report(paths: list[Path], out: Path) -> Path:
    """Draw runs from their summaries into `out`; return it.

    One run is redrawn from summary.json alone, so a stored run needs nothing else.

    Raises:
        BenchError: one is not a run folder, or `out` cannot be written.
    """
    runs = [StoredRun(path) for path in paths]
    lines = series_of(runs)
    pictures: dict[str, str] = {}
    try:
        (out / "plots").mkdir(parents=True, exist_ok=True)
        for name, draw in FIGURES.items():
            with style(name):
                figure = draw(lines)
                if figure is not None:
                    figure.savefig(out / "plots" / f"{name}.png", dpi=DPI)
                    pictures[name] = _svg(figure)
        write_atomically(out / "summary.md", _markdown(runs))
        write_atomically(out / "report.html", _page(runs, pictures))
    except OSError as error:
        raise BenchError(f"cannot write the report to {out}: {error}") from error
    return out


def _markdown(runs: list[StoredRun]) -> str:
    parts = [f"# {_title(runs)}", *(_about(run) for run in runs)]
    parts += [as_markdown(table) for table in _tables(runs)]
    parts += [f"## Failed points\n\n{lines}" for lines in [_failures(runs)] if lines]
    return "\n\n".join([*parts, NOTES]) + "\n"


def _page(runs: list[StoredRun], pictures: dict[str, str]) -> str:
    """Return one HTML file: inline SVG, no script, no address that a browser would fetch."""
    title = html.escape(_title(runs))
    body = [f"<h1>{title}</h1>"]
    body += [f'<p class="note">{html.escape(_about(run))}</p>' for run in runs]
    if failures := _failures(runs):
        body.append(f'<h2>Failed points</h2><pre class="bad">{html.escape(failures)}</pre>')
    body += [f'<figure id="{name}">{svg}</figure>' for name, svg in pictures.items()]
    body += [_html_table(table) for table in _tables(runs)]
    body.append(f'<p class="note">{html.escape(NOTES)}</p>')
    body += [f"<h2>Servers of {html.escape(r.name)}</h2><pre>{_commands(r)}</pre>" for r in runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # or the browser would ask for one
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _tables(runs: list[StoredRun]) -> list[Table]:
    published = published_tables(runs[0]) if len(runs) == 1 else []
    return result_tables(runs) + published


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    firsts = [row[0] for row in table.rows]
    rows = [
        ('<tr class="next">' if number and row[0] != firsts[number - 1] else "<tr>")
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(table.rows)
    ]
    return (
        f'<h2>{html.escape(table.title)}</h2>\n<div class="scroll"><table><thead><tr>{head}</tr>'
        "</thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )


def _svg(figure: Figure) -> str:
    """Return the figure as an inline SVG, without what belongs to a file of its own."""
    out = io.StringIO()
    # without a date the same data gives the same file
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def _title(runs: list[StoredRun]) -> str:
    return "Speculative decoding: " + ", ".join(run.name for run in runs)


def _about(run: StoredRun) -> str:
    return f"{run.name}: {machine_line(run)}; {settings_line(run)}"


def _failures(runs: list[StoredRun]) -> str:
    lines = [
        f"{run.name}: {key}: {reason}"
        for run in runs
        for key, reason in run.summary["failures"].items()
    ]
    return "\n".join(lines)


def _commands(run: StoredRun) -> str:
    lines = [f"{name}\n  {command}" for name, command in run.manifest["commands"].items()]
    return html.escape("\n".join(lines))
