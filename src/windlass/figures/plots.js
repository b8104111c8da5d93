"use strict";
/* How figures are drawn, by reports and by the dashboard: in the colours of the page, and in any width. */

/* Plotly reads <b> and <a> in the texts it draws. */
function safe(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function resolve(value, style) {
  if (typeof value === "string") {
    const match = /^var\((--[a-z]+)\)$/.exec(value);
    return match ? style.getPropertyValue(match[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map((v) => resolve(v, style));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, style)]));
  return value;
}

const figures = new Map(); /* box -> figure, to draw again when light and dark change */

/* Plotly does not wrap text: split an escaped text into lines of at most `most` characters, at spaces where possible. */
function wrapped(text, most) {
  const plain = String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  return (plain.match(new RegExp(`.{1,${most}}(?:\\s|$)|\\S{1,${most}}`, "g")) || [""]).map((line) => safe(line.trim()));
}

/* In a narrow window, titles and long labels are wrapped, the legend moves below the chart, and the chart grows to make room. */
function narrow(box, { data, layout }) {
  const width = box.clientWidth;
  if (!width || width >= 860) return;
  const lines = wrapped(layout.title.text, Math.floor(width / 10));
  let above = 22 * (lines.length - 1), below = 0;
  Object.assign(layout.title, { text: lines.join("<br>"), yanchor: "top", pad: { t: above / 2 + 2 } });
  if (layout.yaxis.type === "category") {
    const names = [...new Set(data.flatMap((trace) => trace.y))].slice(0, 100);
    const labels = names.map((n) => wrapped(n, Math.max(12, Math.floor(width / 22))));
    Object.assign(layout.yaxis, { tickmode: "array", tickvals: names, ticktext: labels.map((parts) => parts.join("<br>")) });
    layout.yaxis.tickfont = { ...layout.yaxis.tickfont, size: 12 };
    const needed = names.length * (8 + 16 * Math.max(...labels.map((parts) => parts.length), 1));
    layout.height += Math.max(0, needed - (layout.height - layout.margin.t - layout.margin.b)); /* a row is as high as its label */
  }
  if (layout.showlegend && layout.legend && layout.legend.orientation === "v") {
    const across = layout.yaxis.type === "category" ? 1 : Math.max(1, Math.floor(width / 230)); /* long labels leave room for one */
    below = 10 + 22 * Math.ceil(data.length / across);
    layout.legend = { ...layout.legend, orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom" };
  }
  if (layout.xaxis.type !== "log") {
    const xs = data.flatMap((trace) => trace.x).filter(Number.isFinite), span = Math.max(...xs) - Math.min(...xs);
    let right = -Infinity; /* of two labels that would overlap, only the first is shown */
    for (const label of [...layout.annotations || []].filter((a) => a.yref === "paper").sort((a, b) => a.x - b.x)) {
      const at = ((label.x - Math.min(...xs)) / (span || 1)) * (width - 110), half = 4 * label.text.length;
      if (at - half < right + 6) label.visible = false;
      else right = at + half;
    }
  }
  layout.margin = { ...layout.margin, t: layout.margin.t + above, b: layout.margin.b + below };
  layout.height += above + below;
  box.style.height = `${layout.height}px`;
}

const touch = matchMedia("(pointer: coarse)");

function plot(box, figure) {
  figures.set(box, figure);
  const drawn = resolve(figure, getComputedStyle(document.documentElement));
  box.style.height = `${drawn.layout.height}px`;
  narrow(box, drawn);
  if (touch.matches) drawn.layout.dragmode = false; /* a finger on a chart scrolls the page */
  Plotly.react(box, drawn.data, drawn.layout, { responsive: true, displaylogo: false, displayModeBar: false });
}

function redraw() {
  for (const [box, figure] of figures) {
    if (box.isConnected) plot(box, figure);
    else figures.delete(box);
  }
}

let widthBefore = innerWidth, resized = null;
window.addEventListener("resize", () => {
  if (innerWidth === widthBefore) return; /* a phone that hides its address bar */
  widthBefore = innerWidth;
  clearTimeout(resized);
  resized = setTimeout(redraw, 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
