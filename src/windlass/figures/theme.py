"""Colours, fonts and the style sheet of all figures: readable with any colour vision, in print and on a projector."""

# Between them every neighbouring pair differs in lightness too, so a grey print still reads.
PALETTE = (
    "#2f6fde",
    "#e0851b",
    "#1f9e6e",
    "#c9405a",
    "#8660c9",
    "#2aa5c0",
    "#9c8321",
    "#7b8794",
    "#d66bb0",
    "#4c5a9e",
    "#6fae3a",
    "#a5573b",
)
HEAT = ((0.0, "#2b3a67"), (0.25, "#2f6fde"), (0.5, "#4fb9b0"), (0.75, "#9fc131"), (1.0, "#fde725"))
# A cell of a heat map that has a word instead of a number: it ran out of memory, it failed. Readable on light and dark.
NO_VALUE = "#c9b1ac"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

LIGHT = {
    "ink": "#1c2430",
    "soft": "#5b6675",
    "paper": "#ffffff",
    "panel": "#f6f8fa",
    "edge": "#d9dfe6",
    "grid": "#e6eaef",
    "accent": "#2f6fde",
}
DARK = {
    "ink": "#e8edf3",
    "soft": "#a3afbd",
    "paper": "#12161c",
    "panel": "#1a2029",
    "edge": "#313b48",
    "grid": "#2a323d",
    "accent": "#6ea1ff",
}


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def _variables(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())


def css() -> str:
    """The style sheet of every page: light or dark as the reader's system says, large enough for a projector."""
    return f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.5 {FONT}; }}
main {{ max-width: 1280px; margin: 0 auto; padding: 28px 24px 64px; }}
h1 {{ font-size: 32px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 24px; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--edge); }}
h3 {{ font-size: 18px; margin: 18px 0 4px; }}
p {{ margin: 8px 0; max-width: 78ch; overflow-wrap: anywhere; }}
a {{ color: var(--accent); }}
.sub, .caption, footer {{ color: var(--soft); }}
.caption {{ font-size: 15px; margin-top: 2px; }}
footer {{ margin-top: 56px; padding-top: 14px; border-top: 1px solid var(--edge); font-size: 14px; }}
.warning {{ border-left: 4px solid #e0851b; background: var(--panel); padding: 8px 14px; border-radius: 4px; white-space: pre-line; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 14px; margin: 14px 0; }}
.card {{ background: var(--panel); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 14px; }}
.card b {{ display: block; font-size: 23px; line-height: 1.25; font-variant-numeric: tabular-nums; }}
@media (max-width: 1000px) {{ .card {{ padding: 10px 12px; }} .card b {{ font-size: 21px; }} }}
.card span {{ color: var(--soft); font-size: 15px; }}
.card i {{ display: block; color: var(--soft); font-size: 13px; font-style: normal; }}
.wide {{ overflow-x: auto; margin: 12px 0; }}
table {{ border-collapse: collapse; width: 100%; font-size: 15px; font-variant-numeric: tabular-nums; }}
table.pairs {{ width: auto; min-width: min(100%, 620px); }}
table.pairs td:first-child {{ color: var(--soft); padding-right: 34px; }}
th {{ text-align: left; border-bottom: 2px solid var(--edge); padding: 6px 10px; vertical-align: bottom; }}
td {{ border-bottom: 1px solid var(--edge); padding: 6px 10px; vertical-align: top; }}
th.n, td.n {{ text-align: right; }}
td.n, td.whole {{ white-space: nowrap; }}
td:last-child:not(.n):not(:first-child) {{ min-width: 260px; }}
tr.strong td {{ font-weight: 650; background: var(--panel); }}
.chart {{ margin: 16px 0 4px; }}
.plot {{ width: 100%; }}
pre, code {{ font-family: ui-monospace, 'SF Mono', Menlo, Consolas, monospace; font-size: 14px; }}
pre {{ background: var(--panel); border: 1px solid var(--edge); border-radius: 8px; padding: 12px 14px; overflow-x: auto; }}
@media (max-width: 700px) {{
  main {{ padding: 14px 12px 48px; }} h1 {{ font-size: 25px; }} h2 {{ font-size: 20px; margin-top: 30px; }}
  .cards {{ grid-template-columns: repeat(2, 1fr); gap: 10px; }} .card {{ min-width: 0; overflow-wrap: anywhere; }}
  table:not(.pairs) {{ font-size: 14px; }} table.pairs {{ min-width: 0; }}
  table.pairs td:first-child {{ padding-right: 12px; }}
  table.pairs td:last-child:not(.n):not(:first-child) {{ min-width: 0; overflow-wrap: anywhere; }}
}}
@media print {{
  @page {{ size: A4; margin: 12mm; }}
  :root {{ color-scheme: light; {_variables(LIGHT)} }}
  body {{ font-size: 10pt; line-height: 1.35; }}
  main {{ max-width: none; padding: 0; }}
  h1 {{ font-size: 15pt; overflow-wrap: anywhere; }}
  h2 {{ font-size: 13pt; break-after: avoid; }}
  p {{ max-width: none; }}
  .sub, table {{ font-size: 9pt; }}
  .chart, .card, tr {{ break-inside: avoid; }}
  .page {{ break-after: page; line-height: 1.25; }}
  .page .cards {{ grid-template-columns: repeat(4, 1fr); gap: 5px; margin: 5px 0; }}
  .page .card {{ padding: 3px 8px; border-radius: 5px; }}
  .page .card b {{ font-size: 12pt; white-space: nowrap; }}
  .page .card span, .page .card i, .page table, .page p {{ font-size: 7.5pt; }}
  .page .warning {{ padding: 2px 8px; margin: 3px 0; }}
  .page .caption {{ margin: 0; }}
  .page .wide {{ margin: 5px 0; }}
  .page th, .page td {{ padding: 2px 6px; }}
  .page th {{ white-space: nowrap; }}
  .page td {{ overflow-wrap: anywhere; }}
  .page td:last-child:not(.n):not(:first-child) {{ min-width: 0; width: 62%; }}
}}
"""
