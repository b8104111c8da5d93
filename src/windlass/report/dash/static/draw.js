"use strict";
/* How do values become a page? Text nodes and attributes only: nothing that came from a file is ever parsed as HTML. */

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

function download(name, href) {
  const link = el("a", { href, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

function downloadText(name, text, kind) {
  const href = URL.createObjectURL(new Blob([text], { type: kind }));
  download(name, href);
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

/* Buttons below a chart: the picture as it is on the screen, and `csv`, the address of every line behind it. */
function tools(box, name, csv) {
  const picture = async (format) => {
    const { data, layout } = resolve(figures.get(box), getComputedStyle(document.documentElement));
    const size = { width: box.clientWidth, height: box.clientHeight };
    const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim();
    await Plotly.downloadImage({ data, layout: { ...layout, ...size, paper_bgcolor: paper } }, { format, ...size, scale: 2, filename: name() });
  };
  const button = (text, call) => el("button", { type: "button", title: `download this chart as ${text}`, on: { click: call } }, text);
  return el("div", { class: "tools" }, button("PNG", () => picture("png")), button("SVG", () => picture("svg")), csv ? button("CSV", () => download(`${name()}.csv`, csv())) : null);
}

function fileName(...parts) {
  return parts.join("-").replace(/[^A-Za-z0-9._-]+/g, "_").slice(0, 100);
}

function layout(title, xTitle, yTitle, height) {
  const axis = { gridcolor: "var(--grid)", zerolinecolor: "var(--grid)", linecolor: "var(--soft)", tickfont: { color: "var(--ink)", size: 14 }, automargin: true, separatethousands: true };
  return {
    title: { text: safe(title), font: { size: 18, color: "var(--ink)" }, x: 0.01, xanchor: "left", y: 0.97, yref: "container" },
    font: { size: 14, color: "var(--ink)" }, height: height || 330, margin: { l: 66, r: 18, t: 46, b: 50 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", uirevision: "keep",
    xaxis: { ...axis, title: { text: safe(xTitle), font: { color: "var(--ink)" } } },
    yaxis: { ...axis, title: { text: safe(yTitle), font: { color: "var(--ink)" }, standoff: 12 } },
    legend: { font: { color: "var(--ink)", size: 14 }, bgcolor: "rgba(0,0,0,0)", orientation: "h", y: -0.24 },
    shapes: [], annotations: [],
  };
}

const PALETTE = ["#2f6fde", "#e0851b", "#1f9e6e", "#c9405a", "#8660c9", "#2aa5c0", "#9c8321", "#7b8794", "#d66bb0", "#4c5a9e", "#6fae3a", "#a5573b"];

function curve(name, xs, ys, index) {
  return { type: "scatter", mode: xs.length <= 12 ? "lines+markers" : "lines", name: safe(name), x: xs, y: ys, connectgaps: false, hovertemplate: "%{y:,.4~r}", line: { color: PALETTE[index % PALETTE.length], width: 2.2 } };
}

function spark(values) {
  const known = values.filter((v) => v !== null);
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 130 30");
  svg.setAttribute("class", "spark");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "loss");
  if (known.length > 1) {
    const low = Math.min(...known), span = Math.max(...known) - low || 1;
    const path = document.createElementNS(ns, "path");
    path.setAttribute("d", known.map((v, i) => `${i ? "L" : "M"}${(2 + (126 * i) / (known.length - 1)).toFixed(1)} ${(27 - (24 * (v - low)) / span).toFixed(1)}`).join(""));
    svg.append(path);
  }
  return svg;
}

function table(item) {
  const right = new Set(item.right), strong = new Set(item.strong), unbroken = new Set(item.unbroken);
  const cell = (tag, text, i) => el(tag, { class: right.has(i) ? "n" : unbroken.has(i) ? "whole" : String(text).length > 60 ? "wrap" : null }, text);
  const titled = item.columns.some((c) => c);
  const head = titled ? el("thead", null, el("tr", null, item.columns.map((c, i) => cell("th", c, i)))) : null;
  const named = (c, r) => (item.links && item.links[r] ? el("td", { class: "wrap" }, el("a", { href: address("run", item.links[r]) }, c)) : cell("td", c, 0));
  const body = el("tbody", null, item.rows.map((row, r) => el("tr", { class: strong.has(r) ? "strong" : null }, row.map((c, i) => (i ? cell("td", c, i) : named(c, r))))));
  return el("div", null, el("div", { class: "wide" }, el("table", { class: titled ? null : "pairs" }, head, body)), item.caption ? el("p", { class: "caption" }, item.caption) : null);
}

function cards(item) {
  return el("div", { class: "cards" }, item.cards.map((c) => el("div", { class: c.value.length > 16 ? "card long" : "card" }, el("b", null, c.value), el("span", null, c.label), c.note ? el("i", null, c.note) : null)));
}

function block(item) {
  if (item.kind === "table") return table(item);
  if (item.kind === "cards") return cards(item);
  if (item.kind === "note") return el("p", { class: item.warning ? "warning" : null }, item.text);
  const box = el("div", { class: "plot", style: `height:${item.height}px`, role: "img", "aria-label": item.title });
  queueMicrotask(() => plot(box, item.figure));
  return el("div", { class: "chart" }, box, tools(box, () => fileName(document.title, item.title)), item.caption ? el("p", { class: "caption" }, item.caption) : null);
}

function sections(parts) {
  return parts.map((part) => el("section", { id: part.id || null }, part.title ? el("h2", null, part.title) : null, part.items.map(block)));
}

/* `#/run/grid/points/a?x=tokens`: a page, the name of a run as its folder is called, and what is set on the page. */
function address(page, name, query) {
  const text = String(new URLSearchParams(query || {}));
  return `#/${page}${name ? `/${name.split("/").map(encodeURIComponent).join("/")}` : ""}${text ? `?${text}` : ""}`;
}

/* A long name may break after its dots, slashes and underscores rather than in the middle of a word. */
function breakable(text) {
  return String(text).split(/(?<=[./_])/).flatMap((part) => [part, el("wbr")]);
}

const SCALES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
function short(value, digits = 2) {
  if (value === null || value === undefined) return "unknown";
  for (const [size, name] of SCALES) if (Math.abs(value) >= size) return `${(value / size).toFixed(digits).replace(/\.?0+$/, "")}${name}`;
  return Number(value.toPrecision(4)).toString();
}
function ago(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  const gone = Math.max(0, Date.now() / 1000 - seconds);
  if (gone < 90) return `${Math.round(gone)} s ago`;
  if (gone < 5400) return `${Math.round(gone / 60)} min ago`;
  if (gone < 172800) return `${Math.round(gone / 3600)} h ago`;
  return `${Math.round(gone / 86400)} days ago`;
}
